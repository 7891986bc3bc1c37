"""Runs command lines of the original torchrun, accelerate and deepspeed.

    original_launchers.py < CASES

CASES is a JSON list of objects with `words` (the command line), `environment` and `directory`. Each
command line runs in a process that is forked from this one, which has imported torch, Accelerate and
DeepSpeed, because an import takes five seconds of CPU time. Prints a JSON list of exit codes.
"""
import json
import os
import sys
import traceback

import accelerate.commands.accelerate_cli
import deepspeed.launcher.launch
import deepspeed.launcher.runner
import torch.distributed.launch
import torch.distributed.run


class LauncherInThisProcess:
    """Replaces `subprocess.Popen` in DeepSpeed's runner: runs `deepspeed.launcher.launch`, which the
    runner would start with another Python, in this process."""

    def __init__(self, command, env):
        module = command.index("deepspeed.launcher.launch")
        os.environ.clear()
        os.environ.update(env)
        sys.argv = command[module:]
        self.returncode = run_main(deepspeed.launcher.launch.main)

    def wait(self):
        return self.returncode


# The functions of the programs, and of the modules that `python -m` runs.
MAINS = {
    "torchrun": torch.distributed.run.main,
    "torch.distributed.run": torch.distributed.run.main,
    "torch.distributed.launch": torch.distributed.launch.main,
    "accelerate": accelerate.commands.accelerate_cli.main,
    "accelerate-launch": accelerate.commands.launch.main,
    "accelerate.commands.launch": accelerate.commands.launch.main,
    "deepspeed": deepspeed.launcher.runner.main,
    "deepspeed.launcher.runner": deepspeed.launcher.runner.main,
}


def run_main(main):
    """Returns the exit code of a program whose function `main` may raise SystemExit."""
    try:
        main()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(bool(end.code))
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def run_case(case):
    """Runs the command line of a case. Returns its exit code."""
    os.environ.clear()
    os.environ.update(case["environment"])
    os.chdir(case["directory"])
    program, *arguments = case["words"]
    if program.startswith("python"):
        # The options of Python precede `-m`; a launcher does not pass them on.
        module = arguments.index("-m")
        program, *arguments = arguments[module + 1 :]
    sys.argv = [program, *arguments]
    config = accelerate.commands.config.config_args
    directory = os.path.join(os.environ["HF_HOME"], "accelerate", "default_config.yaml")
    for module in (config, accelerate.commands.launch):
        module.default_config_file = directory
    deepspeed.launcher.runner.subprocess.Popen = LauncherInThisProcess if "deepspeed" in program else Popen
    return run_main(MAINS[program])


class RunnerModule:
    """The module `subprocess` with another `Popen`, for DeepSpeed's runner only."""

    def __getattr__(self, name):
        return getattr(subprocess, name)


if __name__ == "__main__":
    import subprocess

    Popen = subprocess.Popen
    deepspeed.launcher.runner.subprocess = RunnerModule()
    codes = []
    for case in json.load(sys.stdin):
        child = os.fork()
        if child == 0:
            code = run_case(case)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code & 255)
        codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    print("codes " + json.dumps(codes))
