"""`checkpointd completion`: the script that lets a shell complete commands, options, roots and tags."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

SHELLS = ("bash", "zsh", "fish")


@click.command("completion", short_help="The script for completion in a shell.")
@click.argument("shell", type=click.Choice(SHELLS), metavar="SHELL")
def command(shell: str) -> None:
    """Print the script that completes commands, options, roots and tags in SHELL: bash (4.4 or newer), zsh or fish.

    bash, in ~/.bashrc:    source <(checkpointd completion bash)

    zsh, in ~/.zshrc after compinit:    source <(checkpointd completion zsh)

    fish:    checkpointd completion fish > ~/.config/fish/completions/checkpointd.fish
    """
    from checkpointd.cli.program import COMPLETE_VARIABLE, PROGRAM, commands

    kind = get_completion_class(shell)
    assert kind is not None
    click.echo(kind(commands, {}, PROGRAM, COMPLETE_VARIABLE).source(), nl=False)
