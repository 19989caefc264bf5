"""Does an installed pipeplan do what the README says? python scripts/checks/wheel.py [--keep FOLDER]

Builds a wheel, installs it with nothing but its dependencies into an environment of its own, and runs there, away from
the checkout, all commands of the README that need no torch, and its Python; those that need torch must say so in one
sentence, with exit code 2.
"""

from __future__ import annotations

import argparse
import doctest
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parents[2]
NEEDS_TORCH = re.compile(r"pipeplan (profile|run)\b")
SECONDS = 600
LARGEST = 1_500_000  # bytes of a wheel


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", type=Path, help="Work there, and leave everything.")
    options = parser.parse_args()
    if options.keep is not None:
        options.keep.mkdir(parents=True, exist_ok=True)
        return check(options.keep.resolve())
    with TemporaryDirectory() as folder:
        return check(Path(folder).resolve())


def check(folder: Path) -> int:
    wheel = build(folder)
    scripts = install(wheel, folder)
    place = folder / "away"
    place.mkdir(exist_ok=True)
    failed = contents(wheel) + commands(place, scripts) + python_blocks(place, scripts)
    for sentence in failed:
        print(sentence)
    print(f"{wheel.name}, {wheel.stat().st_size} bytes: {len(failed) or 'nothing'} wrong")
    return 1 if failed else 0


def build(folder: Path) -> Path:
    call([sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", str(folder), source(folder)], folder)
    (wheel,) = folder.glob("*.whl")
    return wheel


def source(folder: Path) -> str:
    """A copy of what git knows, so that building leaves nothing in the checkout."""
    copy = folder / "source"
    if not copy.exists():
        copy.mkdir()
        files = call(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], ROOT)
        subprocess.run(
            ["tar", "--null", "-cf", str(folder / "source.tar"), "-T", "-"],
            input=files,
            text=True,
            cwd=ROOT,
            check=True,
        )
        call(["tar", "-xf", str(folder / "source.tar"), "-C", str(copy)], folder)
    return str(copy)


def install(wheel: Path, folder: Path) -> Path:
    if not (folder / "venv").exists():
        call([sys.executable, "-m", "venv", str(folder / "venv")], folder)
    scripts = folder / "venv" / "bin"
    call([str(scripts / "python"), "-m", "pip", "install", "--quiet", "--force-reinstall", str(wheel)], folder)
    return scripts


def contents(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as file:
        names = set(file.namelist())
        (about,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        metadata = file.read(about).decode()
    files = call(["git", "ls-files", "pipeplan", "profiles"], ROOT).split()
    wanted = {f"pipeplan/{name}" if name.startswith("profiles/") else name for name in files}
    lacking = sorted(name for name in wanted - names if name.endswith((".py", ".json", ".css", ".js", ".typed")))
    found = [f"the wheel lacks {name}" for name in lacking]
    found += [f"the wheel has {name}" for name in sorted(names - wanted) if ".dist-info/" not in name]
    found += [f"the metadata lack {key}" for key in ("License-Expression: MIT", "Classifier: ") if key not in metadata]
    return found + ([f"the wheel has more than {LARGEST} bytes"] if wheel.stat().st_size > LARGEST else [])


def commands(place: Path, scripts: Path) -> list[str]:
    """What goes wrong in the README's commands: their output is not what stands there, or torch is not asked for."""
    readme = (ROOT / "README.md").read_text()
    for name, code in re.findall(r"^```python\n# (\w+\.py)\n(.*?)^```", readme, re.MULTILINE | re.DOTALL):
        (place / name).write_text(code)
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    failed: list[str] = []
    lacking: set[str] = set()
    for block in re.findall(r"^```console\n(.*?)^```", readme, re.MULTILINE | re.DOTALL):
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, _, wanted = part.partition("\n")
            done = run(command, place, scripts)
            if any(name in command for name in lacking):  # made by a command that needs torch
                lacking |= set(re.findall(r"-o (\S+)", command))
            elif NEEDS_TORCH.match(command):
                failed += asks_for_torch(command, done)
                lacking |= set(re.findall(r"-o (\S+)", command))
            elif not doctest.OutputChecker().check_output(wanted, done.stdout, flags):
                failed.append(f"$ {command}: prints\n{done.stdout}{done.stderr}")
            else:
                print(f"$ {command}: as the README says")
    command = "pipeplan run plan.json --model mymodel:build"
    return failed + asks_for_torch(command, run(command, place, scripts))


def asks_for_torch(command: str, done: subprocess.CompletedProcess[str]) -> list[str]:
    said = re.sub(r"^ +[\d.]+ s +.*\n", "", done.stderr, flags=re.MULTILINE)  # but for how long it took until then
    if done.returncode == 2 and "needs torch" in said and said.count("\n") == 1:
        print(f"$ {command}: asks for torch")
        return []
    return [f"$ {command}: ends with {done.returncode} and doesn't ask for torch in one sentence:\n{done.stderr}"]


def python_blocks(place: Path, scripts: Path) -> list[str]:
    readme = (ROOT / "README.md").read_text()
    failed = []
    for code in re.findall(r"^```python\n(?!# \w+\.py)(.*?)^```", readme, re.MULTILINE | re.DOTALL):
        (place / "block.py").write_text(code)
        done = run(f"{scripts}/python block.py", place, scripts)
        if done.returncode:
            failed.append(f"Python block:\n{code}{done.stderr}")
    return failed


def run(command: str, place: Path, scripts: Path) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    environment |= {"PATH": f"{scripts}{os.pathsep}/usr/bin{os.pathsep}/bin", "COLUMNS": "120"}
    return subprocess.run(
        command, shell=True, cwd=place, env=environment, capture_output=True, text=True, timeout=SECONDS
    )


def call(command: list[str], place: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True, timeout=SECONDS)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}:\n{done.stdout}{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
