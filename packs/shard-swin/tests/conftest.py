"""Warnings of torch and timm that are no one's mistake."""


def pytest_configure(config) -> None:
    # Stages and their layers are recomputed, one inside of the other: those inside first run without a gradient.
    config.addinivalue_line("filterwarnings", "ignore:None of the inputs have requires_grad=True:UserWarning")
    # timm 1.0.23 scripts functions while it is imported, which torch 2.14 deprecates; the workers warn as we do.
    config.addinivalue_line("filterwarnings", "ignore:.torch.jit.[a-z_]+. is deprecated:FutureWarning")
