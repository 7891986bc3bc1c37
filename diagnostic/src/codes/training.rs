//! The diagnostic codes (names with explanations) of errors in the built-in training, such as
//! `loss-not-finite`.

codes! {
    TRAIN_SECTION_MISSING: Job = "train-section-missing" {
        summary: "A built-in worker was started for a job without the section `train`.",
        cause: "The job file has neither `run.command` nor `train`.",
        remedy: "Add the section `train`, or run a program with `run.command`.",
    }
    LOSS_NOT_FINITE: Failed = "loss-not-finite" {
        summary: "The loss became NaN or infinite.",
        cause: "The learning rate is too high, the data contain extreme values, or the precision is too narrow.",
        remedy: "Resume from an earlier checkpoint with a lower `train.optimizer.lr`, or use precision bf16.",
    }
    GRADIENT_NOT_FINITE: Failed = "gradient-not-finite" {
        summary: "The norm of the gradients became NaN or infinite although the loss was finite.",
        cause: "The learning rate is too high, or a gradient overflowed at the smallest loss scale.",
        remedy: "Resume from an earlier checkpoint with a lower `train.optimizer.lr`, or use precision bf16.",
    }
    SAMPLE_PROMPT_EMPTY: Job = "sample-prompt-empty" {
        summary: "The prompt for sample generation contains no token.",
        cause: "`train.eval.sample.prompt` is empty, or the tokenizer drops all of its text.",
        remedy: "Set `train.eval.sample.prompt` to a text with at least one token.",
    }
    BATCH_LEAVES_WORKERS_IDLE: Job = "batch-leaves-workers-idle" {
        summary: "A step has fewer micro-batches than the job has workers. This is a warning.",
        cause: "The quotient of `train.batch.global` and `train.batch.micro` is less than the number of workers.",
        remedy: "Raise `train.batch.global`, or lower `train.batch.micro`. Otherwise, idle workers only store shards and compute nothing.",
    }
    TRAIN_INVALID: Job = "train-invalid" {
        summary: "The section `train` has several mistakes.",
        cause: "Keys of the section contradict each other, or do not fit the model or the data.",
        remedy: "Correct the mistakes that are listed with the message.",
    }

    EXPERTS_NOT_IN_MODEL: Job = "experts-not-in-model" {
        summary: "`train.experts` is set, but the model or one of the named layers has no experts.",
        cause: "The model is dense, or `train.experts.placement` names a layer without experts.",
        remedy: "Remove `train.experts` or the layer, or train a mixture-of-experts model.",
    }
    EXPERT_PARALLEL_SIZE_INVALID: Job = "expert-parallel-size-invalid" {
        summary: "The number of workers or of experts is not a multiple of the expert-parallel size.",
        cause: "`train.experts.expert_parallel_size` must divide the number of workers and, with balanced placement, the number of experts.",
        remedy: "Choose a size that divides both numbers, or place the experts with `train.experts.placement`.",
    }
    EXPERT_PLACEMENT_INVALID: Job = "expert-placement-invalid" {
        summary: "`train.experts.placement` does not assign every expert to a rank of the group.",
        cause: "An expert is missing, does not exist, or is assigned to a rank outside of the expert-parallel group.",
        remedy: "Assign each expert of the layer to a rank from 0 to `train.experts.expert_parallel_size` - 1.",
    }

    PARAMETER_PATTERN_INVALID: Job = "parameter-pattern-invalid" {
        summary: "A pattern of parameter names is not a valid glob.",
        cause: "A bracket, brace or class of the pattern is not closed or not valid.",
        remedy: "Correct the pattern; *, ?, [a-z] and {a,b} are supported.",
    }
    PARAMETER_PATTERN_UNMATCHED: Job = "parameter-pattern-unmatched" {
        summary: "A pattern of parameter names matches no parameter of the model.",
        cause: "The pattern is written for another model family, or matches only frozen parameters.",
        remedy: "Compare the pattern with the parameter names in the message.",
    }
    NO_TRAINED_PARAMETERS: Job = "no-trained-parameters" {
        summary: "Every parameter of the model is frozen.",
        cause: "The patterns of `train.freeze` match every parameter of the model.",
        remedy: "Remove or narrow a pattern of `train.freeze`.",
    }

    PEER_REPORT_INVALID: Failed = "peer-report-invalid" {
        summary: "A rank cannot use a message that it received from another rank.",
        cause: "The ranks run different versions of launch, or memory is damaged.",
        remedy: "Install the same version on every host; if all hosts have the same version, report the message.",
    }
    AGENT_CONNECTION_LOST: Failed = "agent-connection-lost" {
        summary: "A worker lost the control connection to its agent.",
        cause: "The agent ended or was killed.",
        remedy: "Read the log of the run, which contains the reason why the agent ended.",
    }
    AGENT_MESSAGE_INVALID: Failed = "agent-message-invalid" {
        summary: "A worker cannot use a control message that it received from its agent.",
        cause: "The installation of launch changed while the job was starting, or memory is damaged.",
        remedy: "Start the job again with one installation of launch; if it happens again, report the message.",
    }
    WORKER_STARTED_DIRECTLY: Job = "worker-started-directly" {
        summary: "`launch worker` was started without an agent.",
        cause: "The command is internal: agents start workers and give them a control connection.",
        remedy: "Start the job with `launch job.yaml`.",
    }
    INHERITED_DESCRIPTOR_INVALID: Job = "inherited-descriptor-invalid" {
        summary: "An environment variable does not name an open descriptor that the worker inherited.",
        cause: "A variable of launch was set by hand or passed on to another process.",
        remedy: "Unset the variable and start the job with `launch job.yaml`.",
    }
    FAULT_INJECTION_INVALID: Job = "fault-injection-invalid" {
        summary: "The variable that injects a fault for tests is not of the form RANK:N or RANK:loop@STEPS.",
        cause: "LAUNCH_FAULT was set by hand.",
        remedy: "Unset LAUNCH_FAULT, or set it to a rank and the number of a fault point, such as 0:3.",
    }
    CPU_INSTRUCTION_SET_UNAVAILABLE: Job = "cpu-instruction-set-unavailable" {
        summary: "The variable LAUNCH_MAX_CPU_ISA names an instruction set that this CPU does not have.",
        cause: "The name is misspelled, or a host has an older CPU than the others.",
        remedy: "Set LAUNCH_MAX_CPU_ISA to one of the names in the message, or unset it.",
    }
    CPU_INSTRUCTIONS_WRONG: Cluster = "cpu-instructions-wrong" {
        summary: "The CPUs of a host compute wrong results with some of their instructions, which are not used.",
        cause: "An error of the CPU or of the hypervisor. The message names the instructions.",
        remedy: "Update the microcode of the CPU or the hypervisor, or use another host. With the remaining instructions, training has the right results, but is slower.",
    }
    WORKER_THREAD_FAILED: Cluster = "worker-thread-failed" {
        summary: "A worker could not start a thread.",
        cause: "The memory is exhausted, or the limit of processes is reached (`ulimit -u`, `pids.max` of the control group).",
        remedy: "Raise the limit, or start fewer workers or threads per host.",
    }
    SHARED_MEMORY_MISSING: Cluster = "shared-memory-missing" {
        summary: "A worker was started without the shared memory of the workers of its host.",
        cause: "The agent could not create the shared memory, or the worker was not started by an agent.",
        remedy: "Start the job with `launch job.yaml`, and check the free memory of the host.",
    }
    OPEN_FILE_LIMIT: Cluster = "open-file-limit" {
        summary: "The limit of open files is too low for the connections to all ranks.",
        cause: "A rank has two connections to each rank on another host, which is more than the hard limit (`ulimit -Hn`).",
        remedy: "Raise the hard limit of open files on the host, for example in /etc/security/limits.conf.",
    }
    INTERFACE_NOT_FOUND: Cluster = "interface-not-found" {
        summary: "No network interface or address of this host matches `cluster.interface`.",
        cause: "The interface has another name on this host, is down, or has no address.",
        remedy: "Set `cluster.interface` to an interface or network that all hosts have, or to `auto`.",
    }
    HOST_ADDRESSES_UNAVAILABLE: Cluster = "host-addresses-unavailable" {
        summary: "This host has no address on which a worker could accept connections of its peers.",
        cause: "No network interface is up, or the operating system did not list the interfaces.",
        remedy: "Configure a network interface on the host.",
    }
    WORKER_LISTEN_FAILED: Cluster = "worker-listen-failed" {
        summary: "A worker could not accept connections on its address.",
        cause: "The address was removed, or all ports are in use.",
        remedy: "Set `cluster.interface` to another interface, or free ports on the host.",
    }
    PEERS_NOT_LISTENING: Cluster = "peers-not-listening" {
        summary: "Not all ranks of the job accepted connections in time.",
        cause: "A host is overloaded, or a worker on another host hangs while it starts.",
        remedy: "Look at the logs of the workers that have not started, and at the load of their hosts.",
    }
    PEER_LIST_INVALID: Failed = "peer-list-invalid" {
        summary: "The list of ranks and addresses that the controller sent does not fit this rank.",
        cause: "A bug of launch, or the installation changed while the job was starting.",
        remedy: "Start the job again; if it happens again, report the message.",
    }
    RANKS_DISAGREE: Failed = "ranks-disagree" {
        summary: "Ranks computed different results for a value that must be equal on all ranks.",
        cause: "A GPU or its memory is faulty, or a collective delivered wrong data.",
        remedy: "Run `launch gpu-check` on each GPU. If the error always occurs with the same host, exclude this host.",
    }

    STORAGE_NOT_WRITABLE: Cluster = "storage-not-writable" {
        summary: "The checkpoint directory cannot be written.",
        cause: "The directory belongs to another user, is on a read-only file system, or its disk is full.",
        remedy: "Set `checkpoint.dir` to a directory that is writable on every host.",
    }
    STORAGE_NOT_SHARED: Cluster = "storage-not-shared" {
        summary: "The hosts do not share the checkpoint directory. In `launch check`, this is a warning. In a job with `checkpoint.require_shared: true`, this is an error.",
        cause: "`checkpoint.dir` is on a local disk, or the shared file system is not mounted on every host.",
        remedy: "Put `checkpoint.dir` on storage that all hosts share, or set `checkpoint.require_shared: false`.",
    }
    STORAGE_NOT_VISIBLE: Cluster = "storage-not-visible" {
        summary: "A rank does not see a file that another rank of its host wrote into the checkpoint directory.",
        cause: "The workers of the host have different mounts, or the file system delays new files.",
        remedy: "Set `checkpoint.dir` to a directory that all workers of a host see.",
    }
    STORAGE_PARTIALLY_SHARED: Cluster = "storage-partially-shared" {
        summary: "One host sees files of a second host in the checkpoint directory, but the second host does not see files of the first.",
        cause: "The directory is an overlay, a snapshot or a copy that is synchronised in one direction only.",
        remedy: "Give each host a separate directory, or give all hosts the same directory.",
    }
    STORAGE_ID_DUPLICATE: Cluster = "storage-id-duplicate" {
        summary: "The host-local checkpoint directories of two hosts have the same identifier.",
        cause: "One directory is a copy of the other, for example from a disk image.",
        remedy: "Remove the file .host from one of the two directories.",
    }
    PARITY_NEEDS_SHARED_STORAGE: Job = "parity-needs-shared-storage" {
        summary: "`checkpoint.parity` is set, but the hosts do not share the checkpoint directory.",
        cause: "Parity is computed over the shards of all ranks. In this job, the shards are on different hosts.",
        remedy: "Put `checkpoint.dir` on storage that all hosts share, or remove `checkpoint.parity`.",
    }
    CHECKPOINT_WRITER_FAILED: Failed = "checkpoint-writer-failed" {
        summary: "Saving a checkpoint stopped unexpectedly.",
        cause: "The background writer panicked, or a rank did not report what it wrote.",
        remedy: "Earlier checkpoints are complete. Resume from the newest one, and report the message.",
    }
    OFFLOAD_STORAGE_UNUSABLE: Job = "offload-storage-unusable" {
        summary: "The optimizer states could not be stored in the memory or directory that `train.zero.offload` names.",
        cause: "The directory is missing or full, or the host has too little memory.",
        remedy: "Set `train.zero.offload` to a directory with free space, or use an optimizer with fewer states.",
    }

    RESUME_NO_USABLE_CHECKPOINT: Checkpoint = "resume-no-usable-checkpoint" {
        summary: "The checkpoint directory contains checkpoints, but all of them are damaged.",
        cause: "Files were removed or changed, or the disk is failing.",
        remedy: "Rebuild a checkpoint with `launch ckpt repair`, remove the checkpoints, or set `resume.from: never` to start at step 0. A batch job that was started again must be submitted again instead.",
    }
    RESUME_BATCH_JOB: Job = "resume-batch-job" {
        summary: "The message reports from where a batch job continues that its scheduler has started again.",
        cause: "The job has `resume.from: never` or a path, and an earlier run of the batch job was interrupted.",
        remedy: "Nothing is required. To begin again, submit the job again.",
    }
    RESUME_MODEL_MISMATCH: Checkpoint = "resume-model-mismatch" {
        summary: "The checkpoint contains another model than the job describes.",
        cause: "Tensors are missing, have other shapes, or have no counterpart in the job's model.",
        remedy: "Change `train.model` to match the config.json of the checkpoint, or resume from another checkpoint.",
    }
    RESUME_OPTIMIZER_MISMATCH: Checkpoint = "resume-optimizer-mismatch" {
        summary: "The checkpoint was written with another optimizer than that of the job.",
        cause: "`train.optimizer.name` changed since the checkpoint was written.",
        remedy: "Use the optimizer of the checkpoint, resume from its weights only, or set `resume.from: never`.",
    }
    RESUME_STATE_INCOMPLETE: Checkpoint = "resume-state-incomplete" {
        summary: "The checkpoint is a training state, but lacks part of the optimizer state.",
        cause: "Files of the checkpoint are missing or cannot be read.",
        remedy: "Use another checkpoint, or gather the weights of this one with `launch ckpt gather` and resume from the weights.",
    }
    RESUME_POSITION_INVALID: Checkpoint = "resume-position-invalid" {
        summary: "The step, sample position or loss scale that the checkpoint records is missing or not valid.",
        cause: "The checkpoint was edited, damaged, or written by a program that does not record the value.",
        remedy: "Resume from another checkpoint, or from its weights only.",
    }
    RESUME_TIED_WEIGHTS_DIFFER: Checkpoint = "resume-tied-weights-differ" {
        summary: "The job ties two matrices that have different values in the checkpoint.",
        cause: "The checkpoint's model has separate input and output embeddings.",
        remedy: "Set `train.model.tie_word_embeddings: false`.",
    }
    RESUME_RNG_STRICT: Checkpoint = "resume-rng-strict" {
        summary: "The job has another number of ranks than the run that saved the checkpoint, and `resume.rng: strict` does not allow this.",
        cause: "The checkpoint holds one RNG state per rank, and the number of ranks changed.",
        remedy: "Resume with the same number of ranks, or set `resume.rng: reconcile`.",
    }
    RESUME_FETCH_FAILED: Checkpoint = "resume-fetch-failed" {
        summary: "Blocks of a host-local checkpoint could not be read on the host that stores them.",
        cause: "A file of the checkpoint is damaged or was removed on that host.",
        remedy: "Use another checkpoint, or restore the file on that host.",
    }
    RESUME_SHARD_UNREACHABLE: Checkpoint = "resume-shard-unreachable" {
        summary: "A shard of a host-local checkpoint is on no host of this job.",
        cause: "The host that stored the shard is not part of the job, or has lost the file.",
        remedy: "Add the host, copy the file into the checkpoint directory of any host, or use another checkpoint.",
    }
    RESUME_MANIFEST_MISSING: Checkpoint = "resume-manifest-missing" {
        summary: "No host has a complete manifest of the checkpoint.",
        cause: "The checkpoint was removed or never committed.",
        remedy: "Use another checkpoint.",
    }

    MODEL_DIRECTORY_INVALID: Job = "model-directory-invalid" {
        summary: "`train.model.from` names a directory that is not a Hugging Face model directory.",
        cause: "The directory is a launch checkpoint, or contains several checkpoints.",
        remedy: "Name the directory of a model. For a checkpoint of launch, use `resume.from` or `launch ckpt gather`.",
    }
    MODEL_DIRECTORY_DIFFERS: Job = "model-directory-differs" {
        summary: "The hosts have different models in the directory that `train.model.from` names.",
        cause: "The directory is local to each host, and the copies differ.",
        remedy: "Copy the same model directory to every host, or put it on shared storage.",
    }
    ADAPTER_MODEL_MISMATCH: Job = "adapter-model-mismatch" {
        summary: "The adapters that `train.lora.from` names belong to another model than `train.model.from`.",
        cause: "Adapter tensors are missing, have other shapes, or have no counterpart in the model.",
        remedy: "Name the adapters that were trained on this model.",
    }
    VOCAB_SIZE_TOO_SMALL: Job = "vocab-size-too-small" {
        summary: "The vocabulary of the model is smaller than that of the tokenizer.",
        cause: "`train.model.vocab_size` is too small, or the model was trained with another tokenizer.",
        remedy: "Remove or raise `train.model.vocab_size`, or use the tokenizer in the directory of the model.",
    }
    SEQUENCE_TOO_LONG: Job = "sequence-too-long" {
        summary: "A sample is longer than the model's position limit.",
        cause: "`train.data.seq_len` is greater than max_position_embeddings.",
        remedy: "Lower `train.data.seq_len`, or use a model with a higher max_position_embeddings.",
    }
    DATA_DIFFERS_BETWEEN_RANKS: Job = "data-differs-between-ranks" {
        summary: "Ranks found different training data.",
        cause: "The files changed while the job started, a pattern matches files that the run writes, or hosts have different files.",
        remedy: "Give all hosts the same data, and start the job when no process writes to the files.",
    }
}
