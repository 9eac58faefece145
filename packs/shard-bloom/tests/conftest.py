"""Warnings of transformers that are no one's mistake."""


def pytest_configure(config) -> None:
    # The head for question answering of transformers 4 passes an argument of which its own model warns.
    config.addinivalue_line("filterwarnings", "ignore:.position_ids. have no functionality in BLOOM:FutureWarning")
