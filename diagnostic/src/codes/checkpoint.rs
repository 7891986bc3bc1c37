//! The diagnostic codes (names with explanations) of errors about checkpoints, such as
//! `checkpoint-not-found`.

codes! {
    CHECKPOINT_NOT_FOUND: Checkpoint = "checkpoint-not-found" {
        summary: "The path of the checkpoint does not exist.",
        cause: "The path is misspelled, or the checkpoint was deleted or is on another host.",
        remedy: "Check the path. `launch ckpt inspect DIR` lists the checkpoints in a directory.",
    }
    CHECKPOINT_NOT_RECOGNIZED: Checkpoint = "checkpoint-not-recognized" {
        summary: "The path exists, but nothing in it belongs to a known checkpoint format.",
        cause: "The path is the parent or a part of a checkpoint, or the format is not supported.",
        remedy: "Give the path of the checkpoint directory itself.",
    }
    CHECKPOINT_DIRECTORY_EMPTY: Checkpoint = "checkpoint-directory-empty" {
        summary: "The checkpoint directory is empty.",
        cause: "No checkpoint was saved yet, or the save or copy was interrupted.",
        remedy: "Use another checkpoint.",
    }
    CHECKPOINT_FORMAT_UNSUPPORTED: Checkpoint = "checkpoint-format-unsupported" {
        summary: "The directory holds a checkpoint in a format that launch does not read.",
        cause: "The checkpoint was written as FSDP local shards, by PyTorch Lightning, or in Meta's format.",
        remedy: "Convert the checkpoint to the Hugging Face format, or save a sharded or full state dict.",
    }
    CHECKPOINT_IS_ADAPTER: Checkpoint = "checkpoint-is-adapter" {
        summary: "The directory is a PEFT adapter, not a whole model.",
        cause: "The path of an adapter was given where a model is expected.",
        remedy: "Merge the adapter into its base model first.",
    }
    CHECKPOINT_NEWEST_UNREADABLE: Checkpoint = "checkpoint-newest-unreadable" {
        summary: "The newest 16 checkpoints in the directory cannot be opened. Older ones were not tried.",
        cause: "Many saves were interrupted, or the files of many checkpoints were removed or damaged.",
        remedy: "Give the path of an older checkpoint.",
    }
    CHECKPOINT_MANIFEST_MISSING: Checkpoint = "checkpoint-manifest-missing" {
        summary: "A step-* directory has no manifest.json.",
        cause: "A save or a removal of this checkpoint was interrupted.",
        remedy: "Use another checkpoint.",
    }
    CHECKPOINT_LATEST_DANGLING: Checkpoint = "checkpoint-latest-dangling" {
        summary: "`latest` names a checkpoint that does not exist or cannot be read.",
        cause: "The checkpoint was deleted or not copied, or its directory is a symbolic link.",
        remedy: "Restore the checkpoint, or give the path of another one.",
    }
    CHECKPOINT_SHARD_MISSING: Checkpoint = "checkpoint-shard-missing" {
        summary: "A file or tensor that belongs to the checkpoint does not exist.",
        cause: "The checkpoint was copied incompletely, or its files are on several hosts.",
        remedy: "Copy the missing files, rebuild them with `launch ckpt repair`, or use another checkpoint.",
    }
    CHECKPOINT_SHARDS_ON_OTHER_HOSTS: Checkpoint = "checkpoint-shards-on-other-hosts" {
        summary: "Some shards are in the checkpoint directories of other hosts.",
        cause: "The checkpoint was saved to host-local storage.",
        remedy: "Copy the shards into one directory, or resume a job that has the same hosts.",
    }
    CHECKPOINT_FETCH_FAILED: Checkpoint = "checkpoint-fetch-failed" {
        summary: "Blocks of a host-local checkpoint cannot be read from another host.",
        cause: "The host failed during the transfer, or its shard is missing or damaged.",
        remedy: "Run `launch ckpt verify` on that host, or use another checkpoint.",
    }
    CHECKPOINT_WEIGHT_MISSING: Checkpoint = "checkpoint-weight-missing" {
        summary: "The checkpoint names weights that it does not store, or has no weights at all.",
        cause: "The program saved only a part of the model, or files were not copied.",
        remedy: "Copy the missing files, run `launch ckpt repair`, or use another checkpoint.",
    }
    CHECKPOINT_DAMAGED: Checkpoint = "checkpoint-damaged" {
        summary: "Files of the checkpoint contradict each other or themselves.",
        cause: "Files of several checkpoints or ranks were mixed, or a file was changed after the save.",
        remedy: "Run `launch ckpt verify`, restore the files, or use another checkpoint.",
    }
    CHECKPOINT_HASH_MISMATCH: Checkpoint = "checkpoint-hash-mismatch" {
        summary: "A block of a shard, or a gathered or converted file, does not match its BLAKE3 hash.",
        cause: "The bytes changed after the save because of a faulty disk, an interrupted copy or an edit.",
        remedy: "Restore the file, rebuild it from parity with `launch ckpt repair`, or use another checkpoint.",
    }
    CHECKPOINT_FILE_TRUNCATED: Checkpoint = "checkpoint-file-truncated" {
        summary: "A file of the checkpoint has another size than recorded.",
        cause: "A copy was interrupted, or the disk was full.",
        remedy: "Copy the file again, run `launch ckpt repair`, or use another checkpoint.",
    }
    CHECKPOINT_FILE_TOO_LARGE: Checkpoint = "checkpoint-file-too-large" {
        summary: "A small file of the checkpoint is larger than the limit.",
        cause: "The file is damaged, or a program replaced the file by another one.",
        remedy: "Restore the file, or use another checkpoint.",
    }
    CHECKPOINT_CONTENT_TOO_LARGE: Checkpoint = "checkpoint-content-too-large" {
        summary: "The files of the checkpoint describe more tensors or bytes than launch reads.",
        cause: "A file is damaged, or was crafted so that a small file describes a huge checkpoint.",
        remedy: "Restore the file, or use another checkpoint.",
    }
    CHECKPOINT_FILE_NOT_REGULAR: Checkpoint = "checkpoint-file-not-regular" {
        summary: "A file of the checkpoint is a symbolic link, a device or a path outside of the directory.",
        cause: "Files of the checkpoint were replaced by links, which launch does not follow.",
        remedy: "Copy the files into the checkpoint directory.",
    }
    CHECKPOINT_JSON_INVALID: Checkpoint = "checkpoint-json-invalid" {
        summary: "A JSON file of the checkpoint cannot be parsed.",
        cause: "The file was cut off or edited.",
        remedy: "Restore the file, or use another checkpoint.",
    }
    CHECKPOINT_MANIFEST_INVALID: Checkpoint = "checkpoint-manifest-invalid" {
        summary: "manifest.json contradicts itself or does not match its hash.",
        cause: "The file was damaged or edited.",
        remedy: "Restore the file, or use another checkpoint.",
    }
    SAFETENSORS_HEADER_INVALID: Checkpoint = "safetensors-header-invalid" {
        summary: "The header of a safetensors file is invalid.",
        cause: "The file is truncated, is a Git LFS pointer or a web page, or was not written by safetensors.",
        remedy: "Download or copy the file again.",
    }
    ZIP_INVALID: Checkpoint = "zip-invalid" {
        summary: "The zip container of a torch file is invalid.",
        cause: "The file is truncated or damaged, or was not written by torch.save.",
        remedy: "Copy the file again, or use another checkpoint.",
    }
    ZIP_CRC_MISMATCH: Checkpoint = "zip-crc-mismatch" {
        summary: "A member of a torch file does not match its CRC-32.",
        cause: "The bytes changed after the save because of a faulty disk, an interrupted copy or an edit.",
        remedy: "Restore the file, run `launch ckpt repair`, or use another checkpoint.",
    }
    PICKLE_GLOBAL_FORBIDDEN: Checkpoint = "pickle-global-forbidden" {
        summary: "A pickle names a class or function that is not on the list of allowed names.",
        cause: "The file stores objects of other libraries, or was crafted to run code when it is loaded.",
        remedy: "Save only tensors and plain values. launch never executes a pickle.",
    }
    PICKLE_INVALID: Checkpoint = "pickle-invalid" {
        summary: "The pickle in a torch file is invalid or exceeds a limit.",
        cause: "The file is damaged, or was not written by torch.save.",
        remedy: "Restore the file, or use another checkpoint.",
    }
    TORCH_FILE_INVALID: Checkpoint = "torch-file-invalid" {
        summary: "The tensors in a torch file do not fit the storages in the file.",
        cause: "The file is damaged, or was written by a version of PyTorch that launch does not know.",
        remedy: "Save the file again with a recent PyTorch, or use another checkpoint.",
    }
    DCP_METADATA_MISSING: Checkpoint = "dcp-metadata-missing" {
        summary: "A torch distributed checkpoint has no .metadata file.",
        cause: "The save was interrupted before its last file, or the hidden file was not copied.",
        remedy: "Copy .metadata too, or use another checkpoint.",
    }
    DCP_METADATA_INVALID: Checkpoint = "dcp-metadata-invalid" {
        summary: "The .metadata file of a torch distributed checkpoint is invalid.",
        cause: "The file is damaged, or uses transformed or overlapping storage, which launch does not support.",
        remedy: "Restore the file, or use another checkpoint.",
    }
    DEEPSPEED_STATE_INVALID: Checkpoint = "deepspeed-state-invalid" {
        summary: "DeepSpeed's model or optimizer files contradict each other.",
        cause: "Files of several checkpoints or ranks were mixed, or a file was damaged.",
        remedy: "Restore the files of all ranks from one save, or use another checkpoint.",
    }
    OPTIMIZER_STATE_INVALID: Checkpoint = "optimizer-state-invalid" {
        summary: "An optimizer's state_dict has an unexpected structure.",
        cause: "The file is damaged, or another object was saved in place of the optimizer.",
        remedy: "Restore the file, or use another checkpoint.",
    }
    CHECKPOINT_VERSION_UNSUPPORTED: Checkpoint = "checkpoint-version-unsupported" {
        summary: "The manifest has a version that this program does not read.",
        cause: "The checkpoint was written by a newer version of launch.",
        remedy: "Update launch.",
    }
    CHECKPOINT_UNSUPPORTED: Checkpoint = "checkpoint-unsupported" {
        summary: "The checkpoint is intact, but this operation does not support its contents.",
        cause: "The checkpoint has a layout, an optimizer or a state that the target cannot represent.",
        remedy: "Choose another target format, or another checkpoint.",
    }
    CHECKPOINT_DTYPE_UNSUPPORTED: Checkpoint = "checkpoint-dtype-unsupported" {
        summary: "A tensor has a dtype that cannot be read as F32 without loss.",
        cause: "The tensor is an integer, F64 or FP8 tensor.",
        remedy: "Convert the tensor to F32, BF16 or F16 first.",
    }
    CHECKPOINT_PARALLELISM_UNSUPPORTED: Checkpoint = "checkpoint-parallelism-unsupported" {
        summary: "The checkpoint has files of tensor, pipeline or expert parallelism.",
        cause: "DeepSpeed ran with model parallelism.",
        remedy: "Convert the checkpoint to the universal or the Hugging Face format with DeepSpeed.",
    }
    ADAPTER_CONFIG_UNSUPPORTED: Checkpoint = "adapter-config-unsupported" {
        summary: "adapter_config.json has a setting that launch does not support.",
        cause: "The adapter uses a method or an option other than plain LoRA or rsLoRA.",
        remedy: "Train or export the adapter without that option.",
    }
    CHECKPOINT_MODEL_MISMATCH: Checkpoint = "checkpoint-model-mismatch" {
        summary: "The checkpoint belongs to a model with other tensors.",
        cause: "The model of the job changed, or the wrong checkpoint was given.",
        remedy: "Use the model that the checkpoint was saved with, or another checkpoint.",
    }
    CHECKPOINT_TENSOR_MISSING: Checkpoint = "checkpoint-tensor-missing" {
        summary: "The checkpoint stores no tensor of the requested name.",
        cause: "The checkpoint belongs to another model or optimizer.",
        remedy: "Use the model and optimizer that the checkpoint was saved with.",
    }
    CHECKPOINT_TENSOR_TOO_SHORT: Checkpoint = "checkpoint-tensor-too-short" {
        summary: "A tensor has fewer elements than requested.",
        cause: "The checkpoint belongs to a model of another size.",
        remedy: "Use the model that the checkpoint was saved with.",
    }
    CHECKPOINT_SPACE_INSUFFICIENT: Failed = "checkpoint-space-insufficient" {
        summary: "The file system has too little free space for the checkpoint.",
        cause: "The disk is almost full. Nothing was written.",
        remedy: "Free space, keep fewer checkpoints (`checkpoint.keep`), or write to another disk.",
    }
    CHECKPOINT_DISK_FULL: Failed = "checkpoint-disk-full" {
        summary: "The disk became full during a write.",
        cause: "Other programs wrote to the same file system. Earlier checkpoints are intact.",
        remedy: "Free space, or keep fewer checkpoints (`checkpoint.keep`).",
    }
    CHECKPOINT_LIMIT_EXCEEDED: Failed = "checkpoint-limit-exceeded" {
        summary: "A write exceeded the disk quota or the limit of file sizes.",
        cause: "A quota or `ulimit -f` is too small. Earlier checkpoints are intact.",
        remedy: "Raise the limit, or use another directory.",
    }
    CHECKPOINT_PERMISSION_DENIED: Failed = "checkpoint-permission-denied" {
        summary: "The operating system denied access to a file or directory.",
        cause: "The user lacks permissions, or the file system is read-only.",
        remedy: "Give this user access, or use another directory.",
    }
    CHECKPOINT_FILES_TOO_MANY: Failed = "checkpoint-files-too-many" {
        summary: "A directory has more than 1048576 checkpoint files, the limit of a verification.",
        cause: "The directory holds many checkpoints, or files of other programs.",
        remedy: "Remove other files, or give the path of one checkpoint.",
    }
    CHECKPOINT_DIRECTORY_BUSY: Failed = "checkpoint-directory-busy" {
        summary: "Another process is writing to the checkpoint directory.",
        cause: "Another run saves to the same directory, or a process of an earlier run is still alive.",
        remedy: "Wait for the other process, end it, or use another directory.",
    }
    CHECKPOINT_SAVE_INVALID: Failed = "checkpoint-save-invalid" {
        summary: "The data that the ranks passed to a save are not one complete checkpoint.",
        cause: "A rank reported wrong or incomplete shards. This is a bug of launch.",
        remedy: "Report the message, the version and the job file.",
    }
    CHECKPOINT_OPTION_INVALID: Failed = "checkpoint-option-invalid" {
        summary: "An option of a checkpoint operation is invalid or does not apply to this checkpoint.",
        cause: "Options contradict each other, or require something that the checkpoint does not have.",
        remedy: "Change or remove the option.",
    }
    CHECKPOINT_OUTPUT_EXISTS: Usage = "checkpoint-output-exists" {
        summary: "The output path exists and is not overwritten.",
        cause: "An earlier run of the command, or another program, wrote to the path.",
        remedy: "Move or remove the output, give another path, or add `--force` if the message suggests this.",
    }
    CHECKPOINT_OUTPUT_INVALID: Usage = "checkpoint-output-invalid" {
        summary: "The output path cannot be used.",
        cause: "The path is inside of the checkpoint that is read, or has no file name.",
        remedy: "Give another output path.",
    }
    CHECKPOINT_VALUE_OVERFLOW: Failed = "checkpoint-value-overflow" {
        summary: "A finite value is outside of the range of the requested dtype.",
        cause: "Weights have large values that FP16 cannot represent.",
        remedy: "Use a wider dtype: bf16 or fp32.",
    }
    CHECKPOINT_IO_FAILED: Failed = "checkpoint-io-failed" {
        summary: "A system call on a file of the checkpoint failed.",
        cause: "The storage is not available, or the disk is faulty.",
        remedy: "Check the storage and the kernel log of the host.",
    }
    RNG_STATE_MISSING: Checkpoint = "rng-state-missing" {
        summary: "An RNG state file of HF Trainer or Accelerate does not exist.",
        cause: "The checkpoint was copied incompletely, or the ranks of other hosts wrote to their own disks.",
        remedy: "Copy the files, or create them from those of the other ranks with `launch ckpt repair`.",
    }
    RNG_STATE_INVALID: Checkpoint = "rng-state-invalid" {
        summary: "An RNG state file of HF Trainer or Accelerate has invalid content.",
        cause: "The file is damaged, or was written by a version of the program whose file layout is unknown.",
        remedy: "Run `launch ckpt repair` to replace damaged files, or remove the files to reseed the generators.",
    }
    RNG_FILES_INCONSISTENT: Checkpoint = "rng-files-inconsistent" {
        summary: "The RNG state files of a checkpoint belong to different programs or runs.",
        cause: "Files of a run with another number of ranks were left in the directory.",
        remedy: "Remove the stale files.",
    }
    RNG_STREAM_MISSING: Checkpoint = "rng-stream-missing" {
        summary: "Some ranks have an RNG stream that other ranks lack.",
        cause: "The files belong to runs with different devices, for example with and without GPUs.",
        remedy: "Use the files of one run.",
    }
    RNG_STREAM_NOT_REPLICATED: Checkpoint = "rng-stream-not-replicated" {
        summary: "A stream that was declared as replicated differs between ranks.",
        cause: "The program seeds each rank differently.",
        remedy: "Remove the stream from `--replicated`, or declare it with `--per-rank`.",
    }
    RNG_STRICT_WOULD_RESEED: Checkpoint = "rng-strict-would-reseed" {
        summary: "The number of ranks changed, and the policy `strict` does not allow new RNG streams.",
        cause: "Each rank has a separate stream, so another number of ranks needs new streams.",
        remedy: "Resume with as many ranks as saved the checkpoint, or use `resume.rng: reconcile`.",
    }
    RNG_OWNER_UNKNOWN: Checkpoint = "rng-owner-unknown" {
        summary: "An RNG stream belongs to an owner, such as an expert, and no rank of the checkpoint has this owner.",
        cause: "The owners of the old and new ranks are missing or do not match.",
        remedy: "Give the owners of all ranks.",
    }
    SCHEDULER_RESCALE_UNSUPPORTED: Checkpoint = "scheduler-rescale-unsupported" {
        summary: "The scheduler state of Accelerate (scheduler.bin) cannot be converted to another number of ranks.",
        cause: "Accelerate's scheduler counts the steps of every process. launch cannot convert a scheduler that consists of several schedulers, or whose pickle has an unknown layout.",
        remedy: "Resume with as many ranks as saved the checkpoint.",
    }
    CONVERT_WEIGHTS_ONLY: Checkpoint = "convert-weights-only" {
        summary: "The source contains only weights, but the target format requires a training state.",
        cause: "The directory is a model, not a training checkpoint.",
        remedy: "Use `--to native` or `--to safetensors`.",
    }
    CONVERT_OPTIMIZER_MISSING: Checkpoint = "convert-optimizer-missing" {
        summary: "The source has no optimizer states, but the target format requires them.",
        cause: "The program did not save its optimizer, or the file was lost.",
        remedy: "Use `--to safetensors` to write the weights.",
    }
    CONVERT_OPTIMIZER_UNREADABLE: Checkpoint = "convert-optimizer-unreadable" {
        summary: "The optimizer states of the source cannot be assigned to its weights.",
        cause: "The optimizer file numbers its states, and the order of the model's parameters is not known.",
        remedy: "Use `--to safetensors` to write the weights.",
    }
    CONVERT_STEP_MISSING: Checkpoint = "convert-step-missing" {
        summary: "The source has optimizer states but does not contain the step at which they were saved.",
        cause: "A file with the training state, such as trainer_state.json, was lost.",
        remedy: "Copy the file into the directory.",
    }
    CONVERT_GROUPS_UNKNOWN: Checkpoint = "convert-groups-unknown" {
        summary: "The source does not record the parameter group of each parameter, but the target format requires this assignment.",
        cause: "DeepSpeed's universal format may store several groups without the names of their parameters.",
        remedy: "Assign the parameters with `--group 'PATTERN=N'`, or use `--to native`.",
    }
    PARAMETER_GROUP_INVALID: Checkpoint = "parameter-group-invalid" {
        summary: "`--group` cannot be applied to the parameter or the group that it names.",
        cause: "The parameter does not exist or has a group already, or the group number is too large.",
        remedy: "Remove or correct the option; `launch ckpt inspect` lists the groups.",
    }
    CONVERT_PARAMETER_ORDER_UNKNOWN: Checkpoint = "convert-parameter-order-unknown" {
        summary: "The order of the parameters in an optimizer group is unknown.",
        cause: "ZeRO files store parameters by position, and the family of the model is not known.",
        remedy: "Use `--to universal`, which stores parameters by name.",
    }
    CONVERT_UPDATE_COUNTS_DIFFER: Checkpoint = "convert-update-counts-differ" {
        summary: "Parameters of one group had different numbers of updates.",
        cause: "Some parameters were frozen for a while. A ZeRO checkpoint stores one count per group.",
        remedy: "Use `--to universal`, which stores the count of each parameter.",
    }
    CONVERT_NAME_UNSUPPORTED: Checkpoint = "convert-name-unsupported" {
        summary: "A parameter name cannot be a directory name, which the universal format requires.",
        cause: "The name is longer than 200 bytes, begins with a dot, or contains a slash.",
        remedy: "Use `--to deepspeed` or `--to native`.",
    }
    CONVERT_STATE_UNSUPPORTED: Checkpoint = "convert-state-unsupported" {
        summary: "The target format has no place for a state of the optimizer.",
        cause: "Only native checkpoints can store the states of this optimizer.",
        remedy: "Use `--to native`, or `--to safetensors` to write the weights without the training state.",
    }
}
