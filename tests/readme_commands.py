"""The shell commands that a Markdown page shows: what its readers will type, and so what tests run."""

import re

SHELL = {"bash", "sh", "shell", "console"}
FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)


def find_commands(page: str) -> list[tuple[int, str]]:
    """Returns (line, command) of the commands in the page's shell blocks, in order.

    A line that ends in a backslash goes on in the next one. Comments are left out. If a block marks its commands with
    `$ `, the other lines are their output.
    """
    return [command for block in FENCE.finditer(page) if block[1] in SHELL for command in _commands_of(page, block)]


def _commands_of(page: str, block: re.Match[str]) -> list[tuple[int, str]]:
    first_line = page.count("\n", 0, block.start(2)) + 1
    commands: list[tuple[int, str]] = []
    is_marked = any(line.startswith("$ ") for line in block[2].splitlines())
    goes_on = False
    for number, line in enumerate(block[2].splitlines(), first_line):
        text = line.removeprefix("$ ") if is_marked else line
        if goes_on:
            start, begun = commands.pop()
            commands.append((start, f"{begun} {text.strip()}"))
        elif is_marked and text == line:
            continue
        elif text.strip() and not text.lstrip().startswith("#"):
            commands.append((number, re.sub(r"\s+#\s.*", "", text).strip()))
        else:
            continue
        start, begun = commands[-1]
        goes_on = begun.endswith("\\")
        commands[-1] = (start, begun.removesuffix("\\").rstrip())
    return commands
