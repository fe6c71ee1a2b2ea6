import pytest

from replug.config.errors import UserError
from replug.planning.accelerators import parse_devices


def test_a_count_and_a_type_are_devices_in_any_spelling_of_the_type() -> None:
    devices = parse_devices("8xa100")
    assert (str(devices), devices.count, devices.nodes) == ("8xA100", 8, 1)


@pytest.mark.parametrize("text", ["8A100", "0xA100", "1.5xA100"])
def test_a_malformed_count_is_an_error_that_shows_the_form(text: str) -> None:
    with pytest.raises(UserError, match=r"--gpus is .*expected COUNTxTYPE.*8xA100"):
        parse_devices(text)


def test_an_unknown_type_is_an_error_that_lists_the_known_ones() -> None:
    with pytest.raises(UserError, match=r"--gpus is '8xB9000': 'B9000' is unknown; expected one of A100, .*MI300X"):
        parse_devices("8xB9000")
    with pytest.raises(UserError, match="did you mean RTX4090"):
        parse_devices("8xRTX409")


def test_an_efficiency_is_a_share_of_the_peak() -> None:
    assert parse_devices("8xA100").rate("bf16_mixed") == 0.35 * 312e12
    assert parse_devices("8xA100", efficiency=0.5).rate("float32") == 0.5 * 19.5e12
    with pytest.raises(UserError, match=r"--efficiency is 1\.5"):
        parse_devices("8xA100", efficiency=1.5)
