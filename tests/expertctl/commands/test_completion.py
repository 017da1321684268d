"""Completion of expertctl's command line."""

import shutil
import subprocess

import pytest

from expertctl.cli import COMMANDS, main
from expertctl.commands.completion import SHELLS

_BASH = """
source {script}
COMP_WORDS=({words}); COMP_CWORD={last}
_shtab_expertctl
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


@pytest.fixture
def script(capsys, tmp_path):
    def make(shell):
        assert main(["completion", shell]) == 0
        path = tmp_path / shell
        path.write_text(capsys.readouterr().out)
        return path

    return make


@pytest.mark.parametrize("shell", SHELLS)
def test_every_command_and_option_is_in_it(script, shell):
    text = script(shell).read_text()
    assert set(COMMANDS) <= {c for c in COMMANDS if c in text}
    assert "arrivals" in text
    if shutil.which(shell):
        subprocess.run([shell, "-n", script(shell)], check=True, timeout=20)


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("expertctl lo", ["load"]),
        ("expertctl load --arr", ["--arrivals"]),
        ("expertctl load --arrivals ''", ["poisson", "fixed"]),
        ("expertctl bench over", ["overload"]),
    ],
)
def test_bash_completes(script, words, found):
    bash = _BASH.format(script=script("bash"), words=words, last=len(words.split()) - 1)
    done = subprocess.run(["bash", "-c", bash], capture_output=True, text=True, check=True, timeout=20)
    assert done.stdout.split() == found, done.stderr


def test_files_complete_to_files(script):
    text = script("bash").read_text()
    assert "_shtab_expertctl_forward___tensors_COMPGEN=_shtab_compgen_files" in text
    assert "_shtab_expertctl_describe___ca_COMPGEN=_shtab_compgen_files" in text


def test_a_shell_that_is_not_known(capsys):
    with pytest.raises(SystemExit):
        main(["completion", "tcsh"])
    assert "bash" in capsys.readouterr().err
