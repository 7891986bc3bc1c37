//! Codes of errors about model configurations and weights.

codes! {
    MODEL_CONFIG_UNSUPPORTED: Job = "model-config-unsupported" {
        summary: "config.json asks for an architecture or setting that launch does not implement.",
        cause: "The model family is not supported, or one of its settings has no implementation.",
        remedy: "Use a supported family (docs/models.md), or run your own program with run.command.",
    }
}
