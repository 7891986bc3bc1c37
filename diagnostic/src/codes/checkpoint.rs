//! Codes of errors about checkpoints.

codes! {
    CHECKPOINT_SHARD_MISSING: Checkpoint = "checkpoint-shard-missing" {
        summary: "A file or tensor that belongs to the checkpoint does not exist.",
        cause: "The checkpoint was copied incompletely, or its files are spread over hosts.",
        remedy: "Copy the missing files, rebuild them with `launch ckpt repair`, or use another checkpoint.",
    }
}
