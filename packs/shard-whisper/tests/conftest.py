"""A Whisper that understands speech, for the tests that generate."""

import pytest


@pytest.fixture(scope="session")
def listener(tmp_path_factory):
    """The folder of a Whisper that understands the speech of `whisper_cases`."""
    from whisper_cases import trained

    folder = tmp_path_factory.mktemp("listener")
    trained().save_pretrained(folder)
    return str(folder)
