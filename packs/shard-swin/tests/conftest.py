"""Warnings of torch that are no one's mistake."""


def pytest_configure(config) -> None:
    # Stages and their layers are recomputed, one inside of the other: those inside first run without a gradient.
    config.addinivalue_line("filterwarnings", "ignore:None of the inputs have requires_grad=True:UserWarning")
