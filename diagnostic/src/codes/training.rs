//! Codes of errors about the training runtime.

codes! {
    LOSS_NOT_FINITE: Failed = "loss-not-finite" {
        summary: "The loss became NaN or infinite.",
        cause: "The learning rate is too high, the data contain extreme values, or the precision is too narrow.",
        remedy: "Resume from an earlier checkpoint with a lower train.optimizer.lr, or use precision bf16.",
    }
}
