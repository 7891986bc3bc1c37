//! The diagnostic codes (names with explanations) of errors about job.yaml, `--set`, host lists,
//! hostfiles and imported configurations, such as `job-file-not-found`.

codes! {
    // --- the file ------------------------------------------------------------------------------
    JOB_INVALID: Job = "job-invalid" {
        summary: "The job file contains several mistakes. Each mistake is reported with a separate code.",
        cause: "Keys or values of the job file are not valid. Nothing was started.",
        remedy: "Correct the mistakes that are listed with the message.",
    }
    JOB_FILE_NOT_FOUND: Job = "job-file-not-found" {
        summary: "The job file does not exist.",
        cause: "The path is misspelled, or it is relative to another directory.",
        remedy: "Check the path; a relative path starts at the current directory.",
    }
    JOB_FILE_UNREADABLE: Job = "job-file-unreadable" {
        summary: "The job file exists but cannot be read.",
        cause: "The path names a directory, or the file's permissions do not allow reading.",
        remedy: "Name a regular file that the current user can read.",
    }
    JOB_TOO_LARGE: Job = "job-too-large" {
        summary: "The job file is larger than 1 MiB.",
        cause: "The file is probably not a job file.",
        remedy: "Check that the path names the job file. Long lists of hosts belong in a hostfile.",
    }
    JOB_NOT_UTF8: Job = "job-not-utf8" {
        summary: "The job file is not UTF-8 text.",
        cause: "The file was saved in another encoding, such as UTF-16 or Latin-1, or it is a binary file.",
        remedy: "Save the file as UTF-8.",
    }
    JOB_CONTROL_CHARACTER: Job = "job-control-character" {
        summary: "A text contains a control character that is not allowed there.",
        cause: "The text was copied from a terminal or a binary file, or a double-quoted string contains an escape such as `\\e`.",
        remedy: "Remove the character; only tabs and line breaks are allowed, and only where text may span lines.",
    }
    JOB_EMPTY: Job = "job-empty" {
        summary: "The job file contains no keys.",
        cause: "The file is empty or has only comments.",
        remedy: "Add `run.command` or a `train` section; docs/job.md lists the keys.",
    }
    JOB_YAML_SYNTAX: Job = "job-yaml-syntax" {
        summary: "The file or the value of --set is not valid YAML.",
        cause: "Typical reasons are a missing quote or bracket, wrong indentation, or tabs used for indentation.",
        remedy: "Correct the text at the reported position.",
    }
    JOB_YAML_UNSUPPORTED: Job = "job-yaml-unsupported" {
        summary: "The file uses a feature of YAML that a job file does not support.",
        cause: "Tags (`!name`), merge keys (`<<`), several documents and keys that are not text are not supported.",
        remedy: "Write the values out in plain YAML.",
    }
    JOB_NESTING_TOO_DEEP: Job = "job-nesting-too-deep" {
        summary: "The file nests lists and mappings more deeply than any job needs.",
        cause: "Brackets are unbalanced, or an alias refers to a deeply nested value.",
        remedy: "Flatten the value at the reported position.",
    }
    JOB_ALIAS_BUDGET: Job = "job-alias-budget" {
        summary: "The file expands to more values than any job needs.",
        cause: "Each YAML alias (`*name`) counts as the value that it repeats, so nested aliases multiply.",
        remedy: "Use fewer aliases, or write a shorter file.",
    }
    JOB_ALIAS_RECURSIVE: Job = "job-alias-recursive" {
        summary: "A YAML alias refers to the value that contains it.",
        cause: "The value that the anchor (`&name`) marks contains the alias (`*name`).",
        remedy: "Write the value out instead of using the alias.",
    }

    // --- keys ----------------------------------------------------------------------------------
    JOB_KEY_UNKNOWN: Job = "job-key-unknown" {
        summary: "The job contains a key that does not exist.",
        cause: "The key is misspelled, or it is written in the wrong section.",
        remedy: "Use the suggested key, or look it up in docs/job.md.",
    }
    JOB_KEY_DUPLICATE: Job = "job-key-duplicate" {
        summary: "A key is given twice in one mapping.",
        cause: "The key was repeated, or it was given by its name and by an alias such as `train_batch_size`.",
        remedy: "Keep one of the two.",
    }
    JOB_KEY_REQUIRED: Job = "job-key-required" {
        summary: "A key that the job needs is missing.",
        cause: "Another key of the job makes this one necessary.",
        remedy: "Add the key that the message names.",
    }
    JOB_KEYS_CONFLICT: Job = "job-keys-conflict" {
        summary: "Two settings of the job contradict each other.",
        cause: "Both keys are valid, but no run can honour both of them.",
        remedy: "Remove or change one of the two keys.",
    }
    JOB_KEY_HAS_NO_EFFECT: Job = "job-key-has-no-effect" {
        summary: "A key has no effect in this job.",
        cause: "The key only applies to another kind of job, such as training on GPUs.",
        remedy: "Remove the key, or add the setting to which the key applies.",
    }
    JOB_KEY_DEPRECATED: Job = "job-key-deprecated" {
        summary: "The job uses the deprecated name of a key or value. This is a warning.",
        cause: "The key or value was renamed. The previous name works for one more release.",
        remedy: "Use the new name that the warning states; docs/job.md lists all deprecated names.",
    }
    JOB_NOTHING_TO_RUN: Job = "job-nothing-to-run" {
        summary: "The job has neither `run.command` nor `train`.",
        cause: "A job needs exactly one of them.",
        remedy: "Add `train` for the built-in training, or `run.command` for a program.",
    }

    // --- values --------------------------------------------------------------------------------
    JOB_VALUE_MISSING: Job = "job-value-missing" {
        summary: "A key is written without a value.",
        cause: "Nothing follows the colon, or the value is `null`.",
        remedy: "Write a value, or remove the key to use its default.",
    }
    JOB_VALUE_TYPE: Job = "job-value-type" {
        summary: "A value has the wrong type, such as text where a number is expected.",
        cause: "In YAML 1.2 `yes`, `1_000` and `\"8\"` are text, and a single item is not a list.",
        remedy: "Write the value in the form that the message states.",
    }
    JOB_VALUE_OUT_OF_RANGE: Job = "job-value-out-of-range" {
        summary: "A value has the right type but is outside of the allowed range.",
        cause: "The number, duration, size or list is too small or too large.",
        remedy: "Use a value within the range that the message states.",
    }
    JOB_VALUE_UNKNOWN: Job = "job-value-unknown" {
        summary: "A value is not one of the names that the key accepts.",
        cause: "The name is misspelled or belongs to another program.",
        remedy: "Use one of the names that the message lists.",
    }
    JOB_VALUE_FORMAT: Job = "job-value-format" {
        summary: "A text is not written in the form that the key expects.",
        cause: "Durations and sizes need a unit, and names may only contain certain characters.",
        remedy: "Write the value in the form that the message states.",
    }
    JOB_VALUE_NOT_MULTIPLE: Job = "job-value-not-multiple" {
        summary: "A value is not a multiple of another value of the job.",
        cause: "The larger quantity is divided into equal parts, for example a batch into micro-batches.",
        remedy: "Change one of the two values; the message names the nearest multiples where that helps.",
    }
    JOB_VALUES_INCONSISTENT: Job = "job-values-inconsistent" {
        summary: "Two values of the job do not fit together.",
        cause: "One value bounds the other, for example a minimum that exceeds the maximum.",
        remedy: "Change one of the two values.",
    }
    JOB_PLACEHOLDER_INVALID: Job = "job-placeholder-invalid" {
        summary: "A path contains a placeholder that is unknown or incomplete.",
        cause: "The text in braces is not a known placeholder, or a brace has no counterpart.",
        remedy: "Use the placeholders that the message lists.",
    }
    JOB_ITEM_DUPLICATE: Job = "job-item-duplicate" {
        summary: "A list contains an item twice.",
        cause: "The item was repeated, or two ranges of host names overlap.",
        remedy: "Remove one of the two items.",
    }
    SET_ARGUMENT_INVALID: Job = "set-argument-invalid" {
        summary: "The argument of --set is not of the form PATH=VALUE.",
        cause: "The equals sign is missing, or the path has an empty part, a bad index, or leads into a plain value.",
        remedy: "Write for example `--set train.steps=50` or `--set train.data.files[0]=a.txt`.",
    }

    // --- hosts ---------------------------------------------------------------------------------
    JOB_HOST_INVALID: Job = "job-host-invalid" {
        summary: "The text that names a host does not have the form `[user@]name[:port]`.",
        cause: "The user, name or port is empty or contains characters that are not allowed.",
        remedy: "Correct the text at the reported character.",
    }
    JOB_HOST_RANGE_INVALID: Job = "job-host-range-invalid" {
        summary: "A range of host names is not valid.",
        cause: "Brackets are unbalanced, or a range has no numbers, ends before it begins, or stands for too many hosts.",
        remedy: "Write ranges as Slurm does: `n[01-16,20]`.",
    }
    JOB_HOST_FILTER_INVALID: Job = "job-host-filter-invalid" {
        summary: "`cluster.include` or `cluster.exclude` cannot be applied to the hosts of the job.",
        cause: "The filter names hosts or slots that do not exist, is not written as `host:slot,slot@host`, or leaves no host.",
        remedy: "Name hosts as in `cluster.hosts` and slots by numbers from 0.",
    }
    HOSTFILE_INVALID: Job = "hostfile-invalid" {
        summary: "A line of the hostfile is not valid.",
        cause: "The line does not have the form `host slots=N` of DeepSpeed and Open MPI, or several lines name a host for which one line has `slots`.",
        remedy: "Correct the line that the message names.",
    }
    HOSTFILE_UNREADABLE: Job = "hostfile-unreadable" {
        summary: "The hostfile cannot be read.",
        cause: "The file does not exist, is not readable, or is larger than 4 MiB.",
        remedy: "Check the path; a relative path starts at `run.workdir`.",
    }

    // --- run -----------------------------------------------------------------------------------
    JOB_WORKDIR_INVALID: Job = "job-workdir-invalid" {
        summary: "`run.workdir` cannot be used as the working directory.",
        cause: "The directory does not exist, or the path cannot be made absolute.",
        remedy: "Create the directory or correct the path.",
    }
    JOB_ENV_NAME_INVALID: Job = "job-env-name-invalid" {
        summary: "`run.env` contains a name that no environment variable can have.",
        cause: "Names consist of letters, digits and underscores, and do not begin with a digit.",
        remedy: "Correct the name.",
    }
    JOB_ENV_NAME_RESERVED: Job = "job-env-name-reserved" {
        summary: "`run.env` sets a variable that launch sets itself.",
        cause: "Variables such as `RANK` and `MASTER_PORT` differ between workers or follow from other keys.",
        remedy: "Remove the variable and use the key that the message names.",
    }
    JOB_SECRET_IN_FILE: Job = "job-secret-in-file" {
        summary: "A variable in `run.env`, or an option in `run.command`, has the name of a secret, or a variable contains a URL with a password, and the job contains the value. This is a warning; for `--set` of `launch manifest kubernetes` it is an error.",
        cause: "The name ends with `_KEY`, or contains a word such as `TOKEN`, `SECRET` or `PASSWORD`. Every user can list arguments.",
        remedy: "Pass the secret in `run.env`, with `{from_env: NAME}` or `{from_file: path}`, so that no file contains the value.",
    }

    JOB_ENV_VALUE_MISSING: Job = "job-env-value-missing" {
        summary: "The value that a variable of `run.env` refers to is not available.",
        cause: "The variable of `from_env` is not set, or the file of `from_file` is absent, unreadable or too large.",
        remedy: "Set the variable or create the file before starting the job.",
    }
    JOB_PASS_ENV_TOO_LARGE: Job = "job-pass-env-too-large" {
        summary: "The patterns of `run.pass_env` match more variables than can be passed to workers.",
        cause: "At most 4096 variables of 1 MiB in total are passed, and each must be text.",
        remedy: "Use narrower patterns.",
    }

    // --- training ------------------------------------------------------------------------------
    JOB_REQUIRES_GPUS: Job = "job-requires-gpus" {
        summary: "A setting requires training on GPUs, and the job trains on CPUs.",
        cause: "`cluster.devices` is `auto` or `cpu`. With both values, the built-in training uses CPUs.",
        remedy: "Set `cluster.devices: cuda`, or remove the setting.",
    }
    JOB_SCHEDULE_TRUNCATED: Job = "job-schedule-truncated" {
        summary: "Training ends before the learning-rate schedule is complete. This is a warning.",
        cause: "The warm-up, or warm-up and decay together, take more steps than `train.steps`.",
        remedy: "Nothing is required in a short trial run. Otherwise, shorten the warm-up or train for more steps.",
    }
    JOB_RESUME_NOTICE: Job = "job-resume-notice" {
        summary: "The message reports from which checkpoint a program resumes, and how the checkpoint was prepared.",
        cause: "The job has `run.command` and `resume.from`.",
        remedy: "Nothing is required; the message is informational.",
    }
    JOB_LORA_WITHOUT_BASE: Job = "job-lora-without-base" {
        summary: "Adapters are trained on a new model, whose random weights stay frozen. This is a warning.",
        cause: "The job has `train.lora` but no `train.model.from`.",
        remedy: "Name the directory of a trained model in `train.model.from`.",
    }
}
