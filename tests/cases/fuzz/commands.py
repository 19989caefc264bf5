"""Random command lines for every command, from what click declares: usual, borderline and odd values, and files.

What takes as long as it is asked to, such as the number of simulated microbatches, is asked for little, and nothing
trains: ``run`` is always ``--dry-run``, ``profile`` always an estimate.
"""

from __future__ import annotations

import random
from pathlib import Path

import click
from cases.fuzz.good import in_folder
from cases.fuzz.judge import Case, called, faults, snapshot, written_faults

from pipeplan.cli import COMMANDS, group

OUTPUTS = [f"out.{ending}" for ending in ("json", "png", "svg", "html", "csv", "txt")]
BESIDE = "out.py"  # which export writes, too
OUTPUT_OPTIONS = {"-o", "--csv", "--trace", "--save", "--recalibrated", "--best"}
PLACES = ["nowhere/out.json", ".", "/dev/null", "/dev/full", "", "out" * 100, "/", "-", "even.json/x.json"]
ODD_FILES = ["missing.json", ".", "/dev/null", "-", "", "bad.json", "empty.json", "\udcff.json", "x" * 5000]
ODD = [
    "", " ", "-", "--", "nan", "inf", "-1", "0", "1e3", "1e999", "9" * 50, "x", "a,b", ",", "\x1b[31mred", "\udcff",
    "é", "%s", "[bold]", "None", "true", "0x10", "1/0", "٣", "a" * 3000,
]  # fmt: skip
AMOUNTS = {
    "SIZE": ["1GB", "16GB", "100MB", "1GiB", "8B", "0", "0GB", "1B", "1EB", "1e17B", "1e9PB", "-1GB", "16", "1 GB"],
    "RATE": ["12GB/s", "10Gbps", "1B/s", "1bps", "0GB/s", "1e18B/s", "12GB", "1e-30GB/s", "PB/s"],
    "TIME": ["5us", "0", "1ms", "2s", "100ns", "0.5s", "1e9s", "-1s", "5", "1h", "2N", "N", "2", "1.5"],
    "N,..": ["1", "1,2,4", "8", "4-6", "0", "1-4096", "2-1", "1,,2", "3,3"],
    "COUNTS": ["1", "2,4", "1-4", "0", "2-1", "5000", "1,,2", "2,2", "-1-2"],
    "COUNTS|NAMES": ["4,4", "2,2,2,2", "1,3", "8", "3,3,2", "l4", "block1,block2", "0,8", "4,,4", "99999999,1"],
    "N|NxN": ["2", "4", "1x2", "8", "2x2", "3", "0", "5000", "2x", "x8", "2x4096", "1-4"],
    "N|NXN": ["2", "4", "1x2", "8", "2x2", "3", "0", "5000", "2x", "x8", "2x4096", "1-4"],
    "SIZE|auto": ["auto", "1MB", "0.1GB", "1GB", "auto1", "-1GB", "1e17B", "2"],
    "PATTERN=NAME,..": [r"block(\d+)=layers.\1", "(.*)=\\1", "x=y,head=lm_head", "(=x", "=", "a=b=c", "[bold]=1"],
    "WORD,..": ["norm,bias", "bias", "norm", ",", "nothing,norm"],
    "NAME|TIME[,TIME]": ["20us", "eager", "megatron", "60us,35us", "graphs", "compiled", "0", "-1us", "1us,", "nope"],
    "FILE.csv": ["runs.csv", "even.json", "missing.csv", "empty.json"],
    "GPUS": ["0/1", "0/1/0", "1/0", "0,1/2-3", "0/0", "0/9", "0,0/1", "/", "0-99999999/1"],
    "all|none|each|LAYERS": ["all", "0-3", "each", "none", "0-1,4", "4,0", "3-1", "99999999", "0-"],
    "auto|N": ["auto", "1", "2", "4", "0", "4097", "auto1"],
    "N|N+SHARED": ["18", "6+12", "0", "+12", "6+", "-1+2", "1e9", "6+12+1", "1.5+0.5"],
    "N|none": ["none", "1", "2", "8", "0", "None"],
    "K|all": ["all", "1", "2", "0"],
    "N": ["1", "2", "4", "300e9", "1e18", "1e19", "0", "2-4"],
    "W": ["1", "2", "4", "2-4", "0", "1000"],
    "F,B,W": ["1,1,1", "20,24,16", "0,0,0", "1,2", "1,x,2", "-1,1,1", "1000000000000,1,1"],
    "PERCENT": ["5%", "0%", "100%", "101%", "-1%", "nan%", "inf%", "1e-9%", "5", "%"],
    "auto|node|block|articulation|N%": ["auto", "node", "block", "1%", "50%", "0%", "100%", "99.9%", "%", "1e1%"],
    "TFLOPS": ["100", "1e-6", "1e6", "nan", "inf", "0", "-0"],
    "NAMES": ["auto", "contiguous,pipedream", "balance", "all", "balance,balance", ","],
    "NAME": ["gpt2-small", "gpt2-medium", "myelin-12b", "gpt-tiny"],
    "--schedule": ["all", "1f1b", "pattern", "pipedream", "gpipe", "interleaved", "zb1p", "zb2p", "zbv", "v-half",
                   "v-min", "dualpipev", "interleaved-zb", "breadth-first", "nf1b", "message-driven"],
    "NAME|FILE": ["a100", "v100", "V100", "accelerator.json", "bad.json", "missing.json", "zoo.json"],
    "GPU": ["a100", "v100", "rtx4090", "accelerator.json", "z100", "bad.json", "even.json"],
    "MODEL": ["zoo:gpt-tiny", "zoo:gpt-tiny,blocks=2", "zoo:gpt-tiny,blocks=-1", "zoo:gpt-tiny,nope=1",
              "zoo:nope", "gpt-tiny", "json:dumps", "missing_module:build", "json:nothing", ":", "a:b:c",
              "zoo:gpt-tiny,tied=true", "zoo:gpt-tiny,loss=fused", "zoo:gpt-tiny,loss=x"],
    "NAME=VALUE": ["gap=1%", "order=given", "jobs=2", "gap=x", "runs=-1",
                   "charge=paper", "straight=true", "charge=tight", "split=true", "charge=x", "=", "straight", "a=b=c"],
    "MODULE:FUNCTION": ["json:dumps", "missing_module:data", "::", "json:"],
    "NAME[,OPTION=VALUE...]": ["AdamW,weight_decay=0.01", "StepLR,step_size=10", "SGD,momentum=nan", "Nope",
                               "SGD,lr=", ","],
    "any|N,N,..": ["1", "any", "2,4", "0", "x", "1,,2", "4096"],
    "any|each|N,N,..": ["1", "any", "each", "2,4", "0", "x", "1,,2", "4096"],
    "--backward-time": ["2N", "1", "N", "0.5", "0", "-1", "N/2", "nan"],
    "ARGUMENTS": ["run.sh", "flags.sh", "even.json", "missing.sh", "bad.json", "empty.json"],
    "FOLDER": ["checkpoints", "even.json", "missing"],
    "DIR": ["checkpoints", "even.json", "/dev/null/x"],
}  # fmt: skip
NEEDED = {"grid": ["--batch", "--gpus", "--mem"], "plan": ["--gpus", "--mem"], "compare": ["--gpus", "--mem"],
          "import": ["--gpus", "--mem"],
          "estimate": ["--gpus", "--gpu"],
          "calibrate": ["--measured"]}  # fmt: skip
LITTLE = {  # how much is asked of what takes as long as it is asked to
    "--microbatches": 64, "--runs": 4, "--gpus": 8, "--batch": 256, "--inter": 4, "--chunks": 4, "--workers": 8,
    "--width": 400, "--steps": 20, "--epochs": 2, "--epoch-length": 50, "--time-points": 400, "--depth": 100,
    "--accumulate": 64, "--limit": 100,
}  # fmt: skip
PLATFORM = {"--platform", "--gpus", "--mem", "--bandwidth", "--latency"}
KINDS = {
    "PROFILE": "profile", "PROFILE...": "profile", "[PROFILE]": "profile", "A": "profile", "B": "profile",
    "PLAN": "plan", "[PLAN]": "plan",
}  # fmt: skip
FILE_OPTIONS = {
    "--platform": "platform",
    "--against": "plan",
    "--microbatch-profile": "profile",
    "--plan": "plan",
    "--load": "plan",
}


FREE = {("profile", "--name"), ("run", "--monitor")}  # any text may be meant


def without_usual_values() -> list[tuple[str, str]]:
    """Return the options, and arguments, for which nothing is known that they would usually be given."""
    found = []
    for name in COMMANDS:
        command = group.get_command(click.Context(group), name)
        assert command is not None
        for param in command.params:
            if getattr(param, "is_flag", False):
                continue
            option, shape = param.opts[0], param.metavar or param.type.name.upper()
            known = option in OUTPUT_OPTIONS or option in FILE_OPTIONS or {option, shape} & AMOUNTS.keys()
            typed = isinstance(param.type, click.Choice | click.IntRange | click.FloatRange)
            if not (known or typed or (isinstance(param, click.Argument) and shape in KINDS)):
                found.append((name, option))
    return found


class Commands:
    """Command lines about the good files of a folder; the same ``seed`` and index give the same line."""

    def __init__(self, folder: Path, good: Path | None = None) -> None:
        self.folder = folder
        self.good = in_folder(folder, good)
        (folder / "bad.json").write_text('{"format": "pipeplan-plan/1", "profile": 3}')
        (folder / "empty.json").write_text("")
        (folder / "run.sh").write_text(
            "L='Et*2|t*2L'\n--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout $L"
        )
        (folder / "flags.sh").write_text("--parallelism.pipeline_parallel_degree=2 --parallelism.num_pp_microbatches 8")
        (folder / "runs.csv").write_text("ms,data_parallel,batch\n10,1,8\n19.5,1,16\n")
        (folder / "checkpoints").mkdir()
        self.all = [name for names in self.good.values() for name in names]

    def case(self, seed: int, index: int) -> Case:
        """Return command line ``index``."""
        rng = random.Random(f"{seed}/command/{index}")
        name = rng.choice([*COMMANDS, "plan", "plan", "simulate", "grid"])
        command = group.get_command(click.Context(group), name)
        assert command is not None
        words: list[list[str]] = []
        share = rng.choice((0.0, 0.05, 0.1, 0.2, 0.5))
        odd = rng.choice((0.0, 0.0, 0.03, 0.2))
        platform = rng.random() < 0.15  # a file instead of the options
        for param in command.params:
            if isinstance(param, click.Argument):
                words += [[self._value(rng, param, odd)] for _ in range(rng.choices((0, 1, 2), (1, 40, 1))[0])]
                continue
            option = param.opts[0]
            needed = option == "--platform" if platform and option in PLATFORM else option in NEEDED.get(name, ())
            wanted = param.required or needed
            for _ in range(2 if param.multiple else 1):
                likely = 0.97 if wanted else share / 5 if option == "--platform" and not platform else share
                if rng.random() < likely:
                    words.append(self._option(rng, param, odd))
        if rng.random() < odd:
            words.append(rng.choice([["--nope"], ["-x"], ["--"], ["extra"], ["--help"], ["-h"], ["--gpus"], [""]]))
        rng.shuffle(words)
        if name == "run":
            words.append(["--dry-run"])
        if name == "completion":  # of the user who runs this
            words = [word for word in words if not word[0].startswith("--install")]
        if name == "calibrate":
            words.append(["--gpu", rng.choice(AMOUNTS["GPU"])])
        if name == "profile":
            words = [["--estimate", rng.choice(AMOUNTS["GPU"])], ["-q"], *words]
        if name in ("plan", "grid", "import", "synthesize"):
            words.append(["--time-limit", "2s"])
        if name == "compare":
            words.append(["--effort", "quick", "--time-limit", "4s"])
        arguments = (name, *(word for option in words for word in option))
        stdin = rng.choice(self.all)
        return Case(name, stdin, (self.folder / stdin).read_bytes(), arguments)

    def _option(self, rng: random.Random, param: click.Parameter, odd: float) -> list[str]:
        option = rng.choice((*param.opts, *param.secondary_opts))
        if getattr(param, "is_flag", False):
            return [f"{option}=1"] if rng.random() < odd / 10 else [option]
        value = self._value(rng, param, odd)
        if rng.random() < odd / 10:
            return [option]
        return [f"{option}={value}"] if option.startswith("--") and rng.random() < 0.2 else [option, value]

    def _value(self, rng: random.Random, param: click.Parameter, odd: float) -> str:
        """Return a value for an option or argument; a share ``odd`` of them is anything."""
        option, kind, shape = param.opts[0], param.type, param.metavar or param.type.name.upper()
        if rng.random() < odd:
            return rng.choice(rng.choice((ODD, ODD_FILES, *AMOUNTS.values())))
        if isinstance(param, click.Argument) and shape in KINDS:
            return self._file(rng, KINDS[shape], odd)
        if option in OUTPUT_OPTIONS:
            return rng.choice(PLACES) if rng.random() < 0.1 + odd else rng.choice(OUTPUTS)
        if option in FILE_OPTIONS:
            return self._file(rng, FILE_OPTIONS[option], odd)
        if isinstance(kind, click.Choice):
            return rng.choice(list(kind.choices))
        if isinstance(kind, click.IntRange | click.FloatRange):
            return self._number(rng, option, kind)
        shape = option if option in AMOUNTS else shape
        if shape in AMOUNTS:
            return rng.choice(AMOUNTS[shape][: 3 if rng.random() < 0.85 else None])
        if kind is click.INT or kind is click.FLOAT:
            return rng.choice(["0", "1", "-1", "0.5", "7", "1e-3", "123456789012345678901234567890"])
        return rng.choice(ODD)

    def usual(self, rng: random.Random, param: click.Parameter) -> str:
        """Return a value that a parameter usually has."""
        if isinstance(param, click.Argument) and param.metavar in KINDS:
            return self.good[KINDS[param.metavar]][0]
        shape = param.metavar or param.type.name.upper()
        return AMOUNTS[shape][0] if shape in AMOUNTS else self._value(rng, param, 0.0)

    def _number(self, rng: random.Random, option: str, kind: click.IntRange | click.FloatRange) -> str:
        low = kind.min or 0
        if rng.random() < 0.04:
            return str(rng.choice((low - 1, low, (kind.max or 0) + 1, -(10**30))))
        most = min(LITTLE.get(option, 10**6), kind.max or 10**18)
        if option not in LITTLE and rng.random() < 0.2:
            return str(kind.max or 10**18)
        number = rng.choice((low, 1, 2, 3, 4, 8, 16, most))
        return str(min(max(number, low), most))

    def _file(self, rng: random.Random, kind: str, odd: float) -> str:
        chance = rng.random()
        if chance < 0.03 + odd / 4:
            return rng.choice(ODD_FILES)
        return rng.choice(self.all) if chance < 0.1 + odd / 2 else rng.choice(self.good[kind])

    def faults(self, case: Case) -> list[str]:
        """Run the command in the folder and return the rules that it broke."""
        before = snapshot(self.folder)
        outcome = called(case.arguments, self.folder, case.data)
        after = snapshot(self.folder)
        named = [*case.arguments, *(word.partition("=")[2] for word in case.arguments)]
        found = faults(outcome, before, after, (), [*OUTPUTS, BESIDE, *named], "--debug" in case.arguments)
        found += written_faults(outcome, case.arguments, self.folder)
        for path in set(after) - set(before):
            Path(path).unlink()
        return found
