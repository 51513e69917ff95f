import pytest

from stages.envs.bash import ActionError, fenced, parse_bash


@pytest.mark.parametrize("command", ["ls", "a\nb", "cat <<'X'\n`one`\nX", "  indented", 'echo "```bash"'])
def test_a_fenced_command_comes_back_verbatim(command: str) -> None:
    assert parse_bash(fenced(command)) == command


def test_free_text_and_other_blocks_do_not_count() -> None:
    text = "I look first.\n```python\nx = 1\n```\n```bash\nls\n```\nThen I wait."
    assert parse_bash(text) == "ls"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "found none"),
        ("ls", "found none"),
        ("```\nls\n```", "found none"),
        ("```sh\nls\n```", "found none"),
        (fenced("ls") + "\n" + fenced("pwd"), "found 2 of them"),
        ("```bash\n\n```", "is empty"),
        ("```bash\n```", "is empty"),
        ("```bash\nls", "does not end"),
        (fenced("ls") + "\n```bash\npwd", "does not end"),
    ],
)
def test_a_malformed_message_is_explained(text: str, said: str) -> None:
    with pytest.raises(ActionError, match=said):
        parse_bash(text)
