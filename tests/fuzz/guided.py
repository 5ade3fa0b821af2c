"""Hostile input by coverage: atheris, libFuzzer's Python, chooses what ``test_inputs`` is asked next.

``python tests/fuzz/guided.py 30`` gives each of them 30 seconds in a process of its own and says how many inputs that
were. An input that breaks a property ends it: its error is printed, and so is the example that hypothesis made of it.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).parent


class Counted:
    """Says now and then how many of libFuzzer's bytes were an input: too few of them make none."""

    def __init__(self, ask: Callable[[bytes], bytes | None]) -> None:
        self.ask = ask
        self.inputs = 0

    def __call__(self, content: bytes) -> None:
        self.inputs += self.ask(content) is not None
        if self.inputs % 10 == 1:
            print(f"asked {self.inputs}", file=sys.stderr)


def one(name: str, seconds: int) -> None:
    """Never returns: libFuzzer leaves the process when the time is over."""
    import atheris

    sys.path[:0] = [str(HERE), str(HERE.parent)]
    with atheris.instrument_imports(include=["ace_plugins.settings", "ace_plugins.checkout", "ace_plugins.report"]):
        import ace_plugins.checkout.marking
        import ace_plugins.report.page
        import ace_plugins.settings.toml_file  # noqa: F401
    import test_inputs
    from toy import ADAPTERS

    from ace_plugins.plugins.registry import registry

    for adapter, plugin in ADAPTERS.items():
        registry().add(plugin(), adapter)
    with tempfile.TemporaryDirectory() as folder:
        options = [f"-max_total_time={seconds}", "-max_len=4096", "-rss_limit_mb=0", f"-artifact_prefix={folder}/"]
        atheris.Setup([sys.argv[0], *options], Counted(getattr(test_inputs, name).hypothesis.fuzz_one_input))
        atheris.Fuzz()


def main(seconds: int) -> int:
    source = (HERE / "test_inputs.py").read_text()
    failed = 0
    for name in re.findall(r"^def (test_\w+)", source, re.MULTILINE):
        done = subprocess.run(
            [sys.executable, __file__, str(seconds), name], capture_output=True, text=True, check=False
        )
        asked = re.findall(r"^asked (\d+)", done.stderr, re.MULTILINE)
        if done.returncode == 0 and asked:
            print(f"{name}: {int(asked[-1]):,} inputs in {seconds} s", flush=True)
        else:
            failed += 1
            print(f"{name}: failed\n{(done.stdout + done.stderr)[-4000:]}", flush=True)
    return failed


if __name__ == "__main__":
    if len(sys.argv) > 2:
        one(sys.argv[2], int(sys.argv[1]))
    sys.exit(main(int(sys.argv[1])))
