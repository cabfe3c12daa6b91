"""The README's commands are real: scripts exist, the job's command lines parse, files are there."""

import shlex
from pathlib import Path

import pytest

from rayjob.__main__ import _parser
from tests.readme_commands import find_commands

REPOSITORY = Path(__file__).resolve().parents[2]

PAGE = """# Title
```bash
bash cluster/run_all.sh            # all of it
# a comment
python -m rayjob plan \\
  --config my.yaml

```
```python
not_a_command()
```
```console
$ bash cluster/test.sh
12 passed
```
"""


def readme_commands() -> list[tuple[int, str]]:
    return find_commands((REPOSITORY / "README.md").read_text())


def words_of_calls(*start: str) -> list[list[str]]:
    """Returns the words behind `start` of every README command that begins with it."""
    calls = [shlex.split(command) for _, command in readme_commands()]
    return [words[len(start) :] for words in calls if words[: len(start)] == list(start)]


def test_commands_of_a_page_are_found() -> None:
    assert find_commands(PAGE) == [
        (3, "bash cluster/run_all.sh"),
        (5, "python -m rayjob plan --config my.yaml"),
        (13, "bash cluster/test.sh"),
    ]


def test_first_command_stands_within_25_lines_and_is_the_whole_job() -> None:
    line, command = readme_commands()[0]
    assert line <= 25
    assert command.split()[:2] == ["bash", "cluster/run_all.sh"]


def test_scripts_of_the_readme_exist() -> None:
    scripts = [words[0] for words in words_of_calls("bash")]
    assert scripts
    assert [script for script in scripts if not (REPOSITORY / script).is_file()] == []


def test_job_commands_of_the_readme_parse() -> None:
    for words in words_of_calls("python", "-m", "rayjob"):
        try:
            _parser().parse_args(words)
        except SystemExit:
            pytest.fail(f"`python -m rayjob {shlex.join(words)}` is no valid call")


def test_files_that_the_readme_names_exist() -> None:
    words = [word for _, command in readme_commands() for word in shlex.split(command)]
    named = [word for word in words if word.startswith(("rayjob/", "serving/", "cluster/", "model/"))]
    assert [word for word in named if not (REPOSITORY / word).exists()] == []


def test_every_file_of_the_product_has_its_line() -> None:
    folders = [REPOSITORY / name for name in ("model", "rayjob", "serving", "cluster")]
    files = [path.relative_to(REPOSITORY) for folder in folders for path in folder.rglob("*.py")]
    readme = (REPOSITORY / "README.md").read_text()
    assert [str(file) for file in files if file.name != "__init__.py" and f"| `{file}` |" not in readme] == []
