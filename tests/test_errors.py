import pytest

from agentlightning.errors import AgentError, ConfigError, RewardError, boundary


def test_what_escapes_foreign_code_is_typed_with_its_cause() -> None:
    with (
        pytest.raises(RewardError, match="reward function failed: ZeroDivisionError") as caught,
        boundary("reward function", RewardError),
    ):
        _ = 1 / 0
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_our_own_errors_pass_a_boundary_unchanged() -> None:
    with pytest.raises(ConfigError, match="as it was"), boundary("agent"):
        raise ConfigError("as it was")


def test_input_errors_have_exit_code_2_and_others_1() -> None:
    assert (ConfigError.exit_code, AgentError.exit_code) == (2, 1)
