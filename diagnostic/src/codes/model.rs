//! The diagnostic codes (names with explanations) of errors about model configurations and weights,
//! such as `model-config-unreadable`.

codes! {
    // --- config.json ---------------------------------------------------------------------------
    MODEL_CONFIG_UNREADABLE: Job = "model-config-unreadable" {
        summary: "The config.json of a model directory cannot be read.",
        cause: "`train.model.from` names a directory without config.json, or the user has no permission to read the file.",
        remedy: "Set `train.model.from` to a directory that save_pretrained of transformers wrote, or that was downloaded from the Hub.",
    }
    MODEL_CONFIG_MALFORMED: Job = "model-config-malformed" {
        summary: "The config.json of a model directory is not a JSON object of at most 1 MiB.",
        cause: "The file is damaged or was copied incompletely, or another file has its name.",
        remedy: "Copy or download the model directory again.",
    }
    MODEL_CONFIG_KEY_MISSING: Job = "model-config-key-missing" {
        summary: "config.json lacks a key that the architecture requires.",
        cause: "The file was edited, or a program other than transformers wrote it.",
        remedy: "Add the key with the value that the model was trained with.",
    }
    MODEL_CONFIG_VALUE_INVALID: Job = "model-config-value-invalid" {
        summary: "A key of the model config has a value of the wrong type or outside of its range.",
        cause: "config.json was edited, or sizes in `train.model` do not fit together, such as heads and hidden_size.",
        remedy: "Correct the key that the message names in config.json or in `train.model`.",
    }
    MODEL_CONFIG_VALUE_UNSUPPORTED: Job = "model-config-value-unsupported" {
        summary: "config.json requests a computation that launch does not implement.",
        cause: "The model uses a variant of its architecture, such as another activation function or RoPE scaling.",
        remedy: "Use another model, or run your own program with `run.command`.",
    }
    MODEL_CONFIG_CONTRADICTORY: Job = "model-config-contradictory" {
        summary: "Two keys of config.json contradict each other.",
        cause: "The file was edited or merged, and has old and new names of one setting with different values.",
        remedy: "Keep the key with the value that the model was trained with, and remove the other one.",
    }
    MODEL_CONFIG_KEY_UNKNOWN: Job = "model-config-key-unknown" {
        summary: "config.json has keys that launch does not know for this architecture.",
        cause: "The model has a feature that is not implemented, or another program added the keys.",
        remedy: "Remove keys that do not change the model's computation; otherwise use another model.",
    }

    // --- architectures -------------------------------------------------------------------------
    MODEL_ARCHITECTURE_UNSUPPORTED: Job = "model-architecture-unsupported" {
        summary: "`architectures` of config.json names no architecture that launch can train.",
        cause: "The model belongs to another family, or has a head for another task than text generation.",
        remedy: "Use a supported architecture (docs/models.md), or run your own program with `run.command`.",
    }
    MODEL_TOO_LARGE: Job = "model-too-large" {
        summary: "The model has more tensors or parameters than launch supports.",
        cause: "The numbers of layers and experts or the widths are wrong, for example in a damaged config.json.",
        remedy: "Correct the sizes in `train.model` or in config.json.",
    }
    MODEL_FAMILY_UNKNOWN: Job = "model-family-unknown" {
        summary: "`train.model.family` is not the name of a model family.",
        cause: "The name is misspelled, or the family is not supported.",
        remedy: "Use one of the families that the message lists.",
    }
    MODEL_KEY_WITHOUT_EFFECT: Job = "model-key-without-effect" {
        summary: "A key of `train.model` does not apply to the model family.",
        cause: "The key configures experts, but the family has no experts, or fixes their width.",
        remedy: "Remove the key, or use a mixture-of-experts family.",
    }
    MODEL_WITHOUT_MOE_LAYERS: Job = "model-without-moe-layers" {
        summary: "The config.json of a mixture-of-experts architecture describes a model without MoE layers.",
        cause: "decoder_sparse_step and mlp_only_layers make every layer a dense layer.",
        remedy: "Correct these keys, or use the dense architecture of the family.",
    }

    // --- features ------------------------------------------------------------------------------
    MODEL_FP8_UNSUPPORTED: Job = "model-fp8-unsupported" {
        summary: "The model cannot be trained with `train.precision: fp8`.",
        cause: "The model has experts, or a matrix dimension is not a multiple of 16.",
        remedy: "Use `train.precision: bf16`.",
    }
    LORA_TARGET_UNKNOWN: Job = "lora-target-unknown" {
        summary: "A LoRA target does not name a matrix that can have an adapter.",
        cause: "The name belongs to another model family, or to an expert, a router, the embedding or the output layer.",
        remedy: "Use names that the message lists, or `train.lora.targets: all-linear`.",
    }
}
