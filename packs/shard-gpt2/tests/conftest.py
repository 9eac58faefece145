"""Warnings of transformers that are no one's mistake."""


def pytest_configure(config) -> None:
    # Before 5.23 functions of GPTBigCode are scripts of torch.jit, which later releases of torch warn of.
    config.addinivalue_line("filterwarnings", "ignore:.torch.jit.script. is deprecated:DeprecationWarning")
