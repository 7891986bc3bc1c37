//! The diagnostic codes (names with explanations) of errors about the command line, unknown runs,
//! batch scripts, and the conversion of other launchers' configurations.

codes! {
    // --- the command line ----------------------------------------------------------------------
    USAGE: Usage = "usage" {
        summary: "The command line is not valid.",
        cause: "An option is unknown, a value is missing or of the wrong form, or two options contradict each other.",
        remedy: "Run the command with --help to see its arguments and options.",
    }
    COMMAND_MISSING: Usage = "command-missing" {
        summary: "The command line names neither a job nor a complete command.",
        cause: "`launch` was called without arguments, or a command such as `launch ckpt` without its subcommand.",
        remedy: "Name a job (`launch job.yaml`), or a command that `launch --help` lists.",
    }
    CODE_UNKNOWN: Usage = "code-unknown" {
        summary: "`launch explain` was called with a code that does not exist.",
        cause: "The code is misspelled, or it belongs to another version of launch.",
        remedy: "Use one of the suggested codes, or run `launch explain` to list all of them.",
    }
    ARGUMENT_NOT_UTF8: Usage = "argument-not-utf8" {
        summary: "A command-line argument is not UTF-8 text.",
        cause: "The argument contains a file name or text in another encoding.",
        remedy: "Pass the value in UTF-8, or write it into a job file or a script.",
    }
    OUTPUT_FAILED: Failed = "output-failed" {
        summary: "Standard output is not writable.",
        cause: "The program that reads the output has ended, or the disk to which the output is written is full.",
        remedy: "Free disk space, or keep the reading program running.",
    }
    OUTPUT_FILE_FAILED: Failed = "output-file-unwritable" {
        summary: "A file that the command line names as output is not writable.",
        cause: "The directory does not exist or is not writable, or the disk is full.",
        remedy: "Choose another file, or free disk space.",
    }
    SERVE_FAILED: Cluster = "serve-failed" {
        summary: "`launch serve` could not serve its page.",
        cause: "Another program uses the port, the port needs privileges, or a limit of open files or threads is reached.",
        remedy: "Choose another port, or leave out --port.",
    }
    JSON_SCHEMA_DEPRECATED: Usage = "json-schema-deprecated" {
        summary: "`--json-schema 1` prints events in the form of earlier releases, and is deprecated. This is a warning.",
        cause: "Schema 2 renamed some events and fields.",
        remedy: "Use schema 2. docs/events.md lists the renamed events and fields.",
    }
    ASYNC_RUNTIME_FAILED: Cluster = "async-runtime-failed" {
        summary: "The command could not start its event loop.",
        cause: "The operating system reached a limit of open files or threads.",
        remedy: "Raise the limit of open files (`ulimit -n`) and of processes (`ulimit -u`).",
    }
    CURRENT_DIRECTORY_UNAVAILABLE: Failed = "current-directory-unavailable" {
        summary: "A relative path could not be resolved.",
        cause: "The current directory was removed, or its parents are not readable.",
        remedy: "Change to an existing directory, or use an absolute path.",
    }
    EXECUTABLE_UNKNOWN: Failed = "executable-unknown" {
        summary: "The path of launch's own executable could not be determined.",
        cause: "/proc is not mounted, or the executable was removed while launch was running.",
        remedy: "Mount /proc, or call launch by its installed path.",
    }

    // --- runs ----------------------------------------------------------------------------------
    RUN_NOT_FOUND: Usage = "run-not-found" {
        summary: "No run matches the name on the command line, or there is no run at all.",
        cause: "The name is misspelled, or the run was removed, or started by another user or on another machine.",
        remedy: "List the runs with `launch ps --all`, or name the run by its directory.",
    }
    RUN_AMBIGUOUS: Usage = "run-ambiguous" {
        summary: "Several runs match, and the command needs exactly one.",
        cause: "Several runs are active, or the names of several runs begin with the given text.",
        remedy: "Give the full name of one of the runs that are listed.",
    }
    RUN_DIRECTORY_INVALID: Usage = "run-directory-invalid" {
        summary: "The path is not the directory of a run.",
        cause: "The directory has no readable `run.json`, because it is not a run directory, or because the run never started.",
        remedy: "Name the directory that `launch ps` shows in the column `files`.",
    }
    RUN_NOT_ACTIVE: Usage = "run-not-active" {
        summary: "There is no active run to stop.",
        cause: "All runs have ended.",
        remedy: "List the runs with `launch ps`.",
    }
    EXEC_RANK_NOT_RUNNING: Cluster = "exec-rank-not-running" {
        summary: "`launch exec` found no running worker of the rank.",
        cause: "No attempt runs at present, the rank has ended, or the job has no such rank.",
        remedy: "Check the run with `launch ps`, and try again.",
    }
    EXEC_UNAVAILABLE: Cluster = "exec-unavailable" {
        summary: "`launch exec` cannot run a command at present.",
        cause: "The controller does not accept connections, or 16 commands already run.",
        remedy: "End other commands of `launch exec`, or log in to the host of the rank.",
    }
    EXEC_INTERRUPTED: Cluster = "exec-interrupted" {
        summary: "`launch exec` lost its connection before the exit code of the command was known.",
        cause: "The controller or the agent of the host has ended.",
        remedy: "Check the run with `launch ps`.",
    }
    RUN_UNATTENDED: Cluster = "run-unattended" {
        summary: "The controller of the run was lost, and the workers continue without a controller.",
        cause: "The controller was killed, or its machine was restarted.",
        remedy: "Run `launch attach RUN` to start another controller.",
    }
    RUN_ON_OTHER_HOST: Cluster = "run-on-other-host" {
        summary: "The controller of the run is on another machine, and the command works only on that machine.",
        cause: "The run was started on another machine that shares the run directory.",
        remedy: "Run the suggested command, which runs launch on the other machine over SSH.",
    }
    RUN_SIGNAL_FAILED: Failed = "run-signal-failed" {
        summary: "No signal could be sent to the controller of a run.",
        cause: "The process belongs to another user, or the kernel does not support pidfd_open (Linux 5.3).",
        remedy: "Stop the run as the user who started it.",
    }
    RUN_STOP_TIMEOUT: Failed = "run-stop-timeout" {
        summary: "A run did not end within `--wait` after the request to stop.",
        cause: "Saving a checkpoint takes long, or the program ignores SIGTERM.",
        remedy: "Wait longer, or kill the run with `launch stop --now`.",
    }
    RUN_LOGS_MISSING: Failed = "run-logs-missing" {
        summary: "The run directory has no logs.",
        cause: "The run ended before a worker started, the logs were removed, or they are on other hosts.",
        remedy: "Look for the logs on the hosts of the run; `run.logs.show` selects the ranks whose output is copied to this machine.",
    }
    RUN_FILE_UNREADABLE: Failed = "run-file-unreadable" {
        summary: "A file of the run directory could not be read.",
        cause: "The file was removed, or its permissions do not allow reading.",
        remedy: "Check the path and its permissions.",
    }
    RANK_OUT_OF_RANGE: Usage = "rank-out-of-range" {
        summary: "`--rank` names a rank that the run does not have.",
        cause: "Ranks are numbered from 0 to the number of workers minus 1.",
        remedy: "Use ranks below the number of workers, which `launch ps` shows.",
    }
    PATTERN_INVALID: Usage = "pattern-invalid" {
        summary: "The argument of `--grep` is not a valid regular expression.",
        cause: "Brackets or braces are unbalanced, or the expression uses a feature such as look-around that is not supported.",
        remedy: "Correct the expression; put a backslash before special characters that are meant literally.",
    }
    CONTROLLER_START_FAILED: Cluster = "controller-start-failed" {
        summary: "The controller of a detached run could not be started.",
        cause: "The operating system reached a limit of processes, or the executable is not readable.",
        remedy: "Check the limits with `ulimit -a`, or run the job without `--detach`.",
    }
    DETACHED_ARGUMENT_INVALID: Usage = "detached-argument-invalid" {
        summary: "The internal option `--detached` was used on the command line.",
        cause: "launch passes this option to its own controller.",
        remedy: "Use `--detach`.",
    }

    // --- launch sbatch -------------------------------------------------------------------------
    SBATCH_HOSTS_UNSUPPORTED: Job = "sbatch-hosts-unsupported" {
        summary: "The hosts of the job are not the nodes that Slurm would allocate.",
        cause: "`cluster.hosts` names hosts, a hostfile or `local`, so the allocated nodes would be idle.",
        remedy: "Remove `cluster.hosts`, or add `--set cluster.hosts=slurm`.",
    }
    SBATCH_TEXT_UNSUPPORTED: Usage = "sbatch-text-unsupported" {
        summary: "A path or argument contains a character that a batch script cannot express.",
        cause: "Option lines of Slurm have no escape for quotes, backslashes, percent signs and line breaks.",
        remedy: "Use a path without these characters, or write the value into the job file.",
    }
    SBATCH_DIRECTORY_FAILED: Cluster = "sbatch-directory-failed" {
        summary: "The directory for the output of the batch job could not be created.",
        cause: "The parent directory is not writable, or the disk is full.",
        remedy: "Make the directory writable, or change `run.logs.dir`.",
    }

    // --- launch import -------------------------------------------------------------------------
    IMPORT_INVALID: Job = "import-invalid" {
        summary: "The configuration contains mistakes, and no job was written.",
        cause: "The file is not a configuration of this launcher, or values have the wrong form.",
        remedy: "Correct the mistakes that are listed with the message.",
    }
    IMPORT_VALUE_INVALID: Job = "import-value-invalid" {
        summary: "A key of the imported configuration has a value of the wrong form.",
        cause: "The launcher that uses the configuration expects a value of another type.",
        remedy: "Write the value in the form that the message states.",
    }
    IMPORT_NOT_A_CONFIG: Job = "import-not-a-config" {
        summary: "The file is not a configuration of the launcher that was named.",
        cause: "A key that every such file has is missing, or the file is not a mapping.",
        remedy: "Check the path and the name of the launcher.",
    }
    IMPORT_UNSUPPORTED: Job = "import-unsupported" {
        summary: "The configuration describes a kind of job that launch does not run.",
        cause: "The file is for TPUs, SageMaker or another accelerator or environment.",
        remedy: "Convert only configurations for CPUs or GPUs on this machine, over SSH or inside Slurm.",
    }
    IMPORT_ARGUMENTS_INVALID: Job = "import-arguments-invalid" {
        summary: "The arguments are not a valid command line of torchrun, accelerate or deepspeed.",
        cause: "An option is unknown or ambiguous, a value is missing or of the wrong form, or no script follows.",
        remedy: "Correct the arguments; `launch import torchrun` expects those of `torchrun` after `--`.",
    }

    // --- launch torchrun, accelerate, deepspeed and shims ---------------------------------------
    DROP_IN_UNSUPPORTED: Usage = "drop-in-unsupported" {
        summary: "An option of torchrun, accelerate or deepspeed has no counterpart in launch.",
        cause: "The option is for accelerators other than GPUs, for a service that launch does not have, or for a way to start processes that launch does not use, such as MPI.",
        remedy: "Follow the advice of the message, or remove the option.",
    }
    DROP_IN_ORIGINAL_MISSING: Usage = "drop-in-original-missing" {
        summary: "The original torchrun, accelerate or deepspeed was not found.",
        cause: "Commands that do not start a job, such as `accelerate config`, run the original program. The program is not installed, or its directory is not in PATH.",
        remedy: "Install the program, activate its Python environment, or add its directory to PATH.",
    }
    DROP_IN_PYTHON_MISSING: Usage = "drop-in-python-missing" {
        summary: "No Python was found to run the script.",
        cause: "PATH contains neither the original program nor `python` nor `python3`.",
        remedy: "Activate the Python environment of the script, or use `--no-python`.",
    }
    PID_FILE_FAILED: Failed = "pid-file-failed" {
        summary: "The file of `deepspeed --save_pid` could not be written.",
        cause: "A file of this name exists, or /tmp is not writable.",
        remedy: "Remove the file, or leave the option out.",
    }
    QUICKSTART_EXISTS: Usage = "quickstart-exists" {
        summary: "`launch quickstart` does not replace a file with other content.",
        cause: "The directory contains a changed quick start, or files of another job.",
        remedy: "Name another directory.",
    }
    SHIM_EXISTS: Usage = "shim-exists" {
        summary: "`launch shims` does not replace a file that is not a link to launch.",
        cause: "The directory contains the original torchrun, accelerate or deepspeed, or another file of this name.",
        remedy: "Use another directory, and put it before the others in PATH.",
    }
    SHIM_FAILED: Failed = "shim-failed" {
        summary: "A link to launch could not be created.",
        cause: "The directory is not writable, or its file system has no symbolic links.",
        remedy: "Use another directory.",
    }

    TERMINAL_REQUIRED: Usage = "terminal-required" {
        summary: "`launch top` was started without a terminal.",
        cause: "stdin or stdout is a pipe or a file, or SSH has not allocated a terminal.",
        remedy: "Run the command in a terminal, or use `launch events` and `launch logs`.",
    }
    VIEW_FAILED: Failed = "view-failed" {
        summary: "`launch top` could not show the run.",
        cause: "The terminal was closed, or the directory of the run was deleted.",
        remedy: "Check with `launch ps` that the run exists.",
    }

    // --- launch ckpt ---------------------------------------------------------------------------
    CONVERT_OPTION_UNSUPPORTED: Usage = "convert-option-unsupported" {
        summary: "An option does not apply to the format that `launch ckpt convert --to` names.",
        cause: "`safetensors` has no ranks, ZeRO stages or parameter groups, and only `deepspeed` has a sub-group size.",
        remedy: "Leave the option out, or choose another format.",
    }
    CONVERT_GROUP_INVALID: Usage = "convert-group-invalid" {
        summary: "A `--group` rule cannot be applied to the checkpoint.",
        cause: "The rule names a group that does not exist, matches no parameter, or overlaps with another rule.",
        remedy: "Compare the rule with the groups and names that `launch ckpt inspect` shows.",
    }
    CONVERT_MEMORY_TOO_SMALL: Usage = "convert-memory-too-small" {
        summary: "`--memory` is smaller than the conversion needs.",
        cause: "`--to safetensors` needs up to 256 MB.",
        remedy: "Raise `--memory`.",
    }
    WATCH_DIRECTORY_INVALID: Usage = "watch-directory-invalid" {
        summary: "`launch ckpt watch` cannot watch the path, or cannot write the weights to the directory of `--gather`.",
        cause: "The path is a file, or both directories are the same.",
        remedy: "Name the directory of the checkpoints, and another directory for the weights.",
    }
    RESUME_PATH_NOT_UTF8: Checkpoint = "resume-path-not-utf8" {
        summary: "The directory to resume from has a name that is not UTF-8 text.",
        cause: "The program receives the path in an environment variable and in its arguments, which must be text.",
        remedy: "Rename the directory.",
    }
}
