//! Compares every model family with transformers and PyTorch: logits, loss, every gradient and ten
//! AdamW steps of models that `save_pretrained` wrote (tests/golden/families/README.md). Further
//! tests check loading, saving and resuming of these models, and the errors of unsupported configs.
use crate::common::{
    families::{
        create_pretrained_model_spec, golden_model_directory, list_family_cases, load_family_case,
        start_from_pretrained,
    },
    golden::{self, read_json},
    *,
};
use ckpt::{Checkpoint, Dtype, GatherOptions};
use diagnostic::{
    Diagnostic,
    codes::{model as codes, training::RESUME_MODEL_MISMATCH},
};
use jobspec::ModelSpec;
use protocol::{control::FromWorker, event::Event};
use serde_json::{Value, json};
use std::{path::Path, sync::Arc};
use worker::{
    checkpoint::resume::PretrainedModel,
    model::{MODEL_FAMILIES, ModelError},
    train::running_trainer::Cursor,
};

#[test]
fn logits_gradients_and_steps_match_transformers() {
    for name in list_family_cases() {
        println!("{name}");
        golden::assert_golden_case(&load_family_case(&name), |case| {
            start_from_pretrained(&case.spec, Arc::new(comm::thread_comm::create_thread_group(1).remove(0)))
        });
    }
}

#[test]
fn every_family_has_a_golden_case() {
    let read_model_type =
        |name: &String| read_json(&golden_model_directory(name).join("config.json"))["model_type"].clone();
    let tested: Vec<Value> = list_family_cases().iter().map(read_model_type).collect();
    for family in MODEL_FAMILIES {
        assert!(tested.contains(&family.name.into()), "{} has no golden case: {tested:?}", family.name);
    }
}

#[test]
fn every_family_has_the_same_bits_for_every_world_size_and_stage() {
    for (i, name) in list_family_cases().iter().enumerate() {
        let spec = |stage| {
            let mut s = create_train_spec(
                create_pretrained_model_spec(&golden_model_directory(name)),
                stage,
                6,
                1,
                13,
            );
            s.steps = 4;
            s
        };
        let run = |stage, world| {
            expect_equal_on_all_ranks(run_on_ranks(world, |c| {
                train_steps(&mut start_from_pretrained(&spec(stage), c), 3)
            }))
        };
        let expected = run(0, 1);
        let mut recompute = spec(3);
        recompute.recompute = jobspec::RecomputeMode::Block;
        let recomputed =
            run_on_ranks(2, |c| train_steps(&mut start_from_pretrained(&recompute, c), 3)).remove(0);
        assert_eq!(recomputed, expected, "{name}: recomputation");
        for stage in 0..=3 {
            // Half of the pairs per case; deterministic_training.rs tests all of them with one
            // model.
            for world in (1..=4).filter(|world| (world + usize::from(stage) + i).is_multiple_of(2)) {
                assert_eq!(run(stage, world), expected, "{name}: world {world}, stage {stage}");
            }
        }
    }
}

/// Loads a model on `world` ranks, saves a checkpoint without training, and gathers its weights
/// into `out`.
fn load_and_gather(directory: &Path, world: usize, out: &Path, dtype: Dtype) {
    let dir = tempfile::tempdir().unwrap();
    let spec = create_train_spec(create_pretrained_model_spec(directory), 3, 4, 1, 13);
    let job = create_job_spec(&spec, dir.path(), false);
    run_on_ranks(world, |c| {
        let mut running = start_from_pretrained(&spec, c);
        let mut saver = create_checkpoint_saver(&running, &job, dir.path());
        saver.begin_save(&mut running).unwrap();
        assert_eq!(saver.finish_and_commit_save(&running).unwrap().unwrap().step, 0);
    });
    let checkpoint = Checkpoint::open(&dir.path().join("step-00000000")).unwrap();
    let options = GatherOptions { dtype: Some(dtype), ..GatherOptions::default() };
    ckpt::gather_weights(&checkpoint, out, &options, |_, _| {}).unwrap();
}

#[test]
fn untrained_weights_are_gathered_with_the_bits_that_were_loaded() {
    for (i, name) in list_family_cases().iter().enumerate() {
        let dir = tempfile::tempdir().unwrap();
        let (world, first) = (1 + i % 4, dir.path().join("first"));
        let weights = |directory: &Path| std::fs::read(directory.join("model.safetensors")).unwrap();
        load_and_gather(&golden_model_directory(name), world, &first, Dtype::F32);
        let bits = |file: &[u8]| -> Vec<(String, Vec<u32>)> {
            let tensors = golden::parse_safetensors(file).into_iter();
            tensors.map(|(name, x)| (name, x.iter().map(|x| x.to_bits()).collect())).collect()
        };
        assert_eq!(bits(&weights(&first)), bits(&weights(&golden_model_directory(name))), "{name}");
        assert_eq!(
            read_json(&first.join("config.json")),
            read_json(&golden_model_directory(name).join("config.json")),
            "{name}"
        );

        // A model that was gathered in BF16 is loaded exactly.
        let (second, third) = (dir.path().join("second"), dir.path().join("third"));
        load_and_gather(&golden_model_directory(name), 1, &second, Dtype::BF16);
        load_and_gather(&second, 3, &third, Dtype::BF16);
        assert_eq!(weights(&second), weights(&third), "{name}");
        assert_eq!(read_json(&third.join("config.json"))["dtype"], "bfloat16");
    }
}

#[test]
fn a_run_from_pretrained_weights_resumes_with_the_same_bits() {
    let names =
        ["gemma3", "gpt2", "llama_biases_tied", "mistral_window", "mixtral", "qwen2", "qwen3", "qwen3_moe"];
    for name in names {
        let spec = |stage| {
            create_train_spec(create_pretrained_model_spec(&golden_model_directory(name)), stage, 6, 1, 13)
        };
        let whole = run_on_ranks(1, |c| train_steps(&mut start_from_pretrained(&spec(0), c), 5)).remove(0);
        let dir = tempfile::tempdir().unwrap();
        run_on_ranks(3, |c| {
            let mut running = start_from_pretrained(&spec(3), c);
            train_steps(&mut running, 3);
            save_checkpoint(&mut running, &spec(3), dir.path());
        });
        let losses =
            run_on_ranks(2, |c| train_steps(&mut resume_newest_checkpoint(&spec(1), c, dir.path()).0, 2));
        assert_eq!(losses, [&whole[3..], &whole[3..]], "{name}");
    }
}

/// Returns the error of building a golden model whose config.json was changed by `change`, or
/// `None` if the config is accepted.
fn find_build_error(
    name: &str,
    change: impl FnOnce(&mut serde_json::Map<String, Value>),
) -> Option<ModelError> {
    let dir = tempfile::tempdir().unwrap();
    let mut config = read_json(&golden_model_directory(name).join("config.json"));
    change(config.as_object_mut().unwrap());
    std::fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
    worker::model::build_model(&create_pretrained_model_spec(dir.path()), 16).err()
}

/// Returns the error of building a golden model with another value of one config key, or `None` if
/// the config is accepted.
fn find_error_with(name: &str, key: &str, value: &Value) -> Option<ModelError> {
    find_build_error(name, |config| drop(config.insert(key.into(), value.clone())))
}

/// The name of a golden model of the Llama family, whose config tests change.
const LLAMA: &str = "llama_biases_tied";

/// The name of a golden model, a config key, and a value for the key.
type ConfigCase = (&'static str, &'static str, Value);

/// Asserts that each value is rejected with this code, and that the error names the key.
fn assert_configs_rejected(code: diagnostic::Code, cases: &[ConfigCase]) {
    for (name, key, value) in cases {
        let error = find_error_with(name, key, value).unwrap_or_else(|| panic!("{name}: {key}: {value}"));
        let error = Diagnostic::from(error);
        assert_eq!(error.code(), code, "{name}: {key}: {value}: {error}");
        let named_key = match error.field("config_keys") {
            Some(keys) => keys[0].clone(),
            None => error.field("config_key").cloned().unwrap_or_default(),
        };
        // The error of a nested mapping names a key in it.
        let outer_key = named_key.as_str().and_then(|key| key.split('.').next());
        assert_eq!(outer_key, Some(*key), "{name}: {key}: {value}: {error}");
    }
}

#[test]
fn unsupported_values_of_config_keys_are_rejected() {
    assert_configs_rejected(
        codes::MODEL_CONFIG_VALUE_UNSUPPORTED,
        &[
            (LLAMA, "hidden_act", json!("gelu")),
            (LLAMA, "pretraining_tp", json!(2)),
            (LLAMA, "partial_rotary_factor", json!(0.5)),
            (LLAMA, "rope_interleaved", json!(true)),
            (LLAMA, "rope_parameters", json!({"rope_type": "longrope", "factor": 2})),
            ("mixtral", "router_jitter_noise", json!(0.1)),
            ("gpt2", "activation_function", json!("relu")),
            ("gpt2", "add_cross_attention", json!(true)),
            ("gemma2", "hidden_activation", json!("gelu")),
            ("gemma2", "use_bidirectional_attention", json!(true)),
            ("gemma3", "attn_logit_softcapping", json!(50.0)),
        ],
    );
}

#[test]
fn invalid_values_of_config_keys_are_rejected() {
    assert_configs_rejected(
        codes::MODEL_CONFIG_VALUE_INVALID,
        &[
            (LLAMA, "attention_dropout", json!(1)),
            (LLAMA, "attention_dropout", json!(-0.1)),
            (LLAMA, "attention_dropout", json!("0.1")),
            (LLAMA, "num_key_value_heads", json!(3)),
            (LLAMA, "head_dim", json!(5)),
            (LLAMA, "vocab_size", json!(-1)),
            (LLAMA, "vocab_size", json!(1u64 << 40)),
            (LLAMA, "rms_norm_eps", json!(0)),
            (LLAMA, "tie_word_embeddings", json!("yes")),
            (LLAMA, "num_hidden_layers", json!(1 << 20)),
            ("qwen2_sliding_layers", "layer_types", json!(["full_attention", "chunked_attention"])),
            ("mixtral", "num_experts_per_tok", json!(9)),
            ("mixtral", "router_aux_loss_coef", json!(-1)),
            ("mixtral", "num_local_experts", json!(1 << 20)),
            ("qwen3_moe", "mlp_only_layers", json!([3])),
            ("qwen3_moe", "norm_topk_prob", json!(1)),
            ("gpt2", "attn_pdrop", json!(1.5)),
            ("gpt2", "resid_pdrop", json!(null)),
            ("gpt2", "n_head", json!(3)),
            ("gpt2", "scale_attn_weights", json!(1)),
            ("gemma2", "final_logit_softcapping", json!(-1)),
            ("gemma3", "rope_parameters", json!({"rope_type": "default"})),
        ],
    );
}

#[test]
fn unknown_contradictory_and_missing_config_keys_are_rejected() {
    assert_configs_rejected(
        codes::MODEL_CONFIG_KEY_UNKNOWN,
        &[
            (LLAMA, "resid_pdrop", json!(0.1)),
            (LLAMA, "quantization_config", json!({"bits": 4})),
            (LLAMA, "logits_scaling", json!(2.0)),
            (LLAMA, "sliding_window", json!(8)),
            ("mixtral", "shared_expert_intermediate_size", json!(8)),
            ("gpt2", "rope_theta", json!(1e4)),
        ],
    );
    assert_configs_rejected(
        codes::MODEL_CONFIG_CONTRADICTORY,
        &[
            (LLAMA, "rope_scaling", json!({"type": "linear", "factor": 2})),
            ("qwen3_moe", "num_experts", json!(7)),
            ("gemma3", "rope_scaling", json!({"type": "linear", "factor": 8})),
        ],
    );
    assert_configs_rejected(
        codes::MODEL_CONFIG_KEY_MISSING,
        &[(LLAMA, "hidden_size", json!(null)), ("mixtral", "num_local_experts", json!(null))],
    );
}

#[test]
fn configs_of_unsupported_architectures_and_layers_are_rejected() {
    for (architectures, names) in [(json!(["NewForCausalLM"]), vec!["NewForCausalLM"]), (json!(null), vec![])]
    {
        let error = find_error_with(LLAMA, "architectures", &architectures);
        assert!(
            matches!(&error, Some(ModelError::ArchitectureUnsupported { architectures, .. }) if *architectures == names),
            "{error:?}"
        );
    }
    let error = find_error_with(LLAMA, "model_type", &json!("qwen2"));
    assert!(
        matches!(&error, Some(ModelError::ModelTypeMismatch { model_type, .. }) if model_type == "qwen2"),
        "{error:?}"
    );
    // The layer types require a window.
    let error = find_error_with("qwen2_sliding_layers", "use_sliding_window", &json!(false));
    assert!(
        matches!(&error, Some(ModelError::ValueInvalid { key, .. }) if key == "layer_types"),
        "{error:?}"
    );
    let dense = find_error_with("qwen3_moe", "mlp_only_layers", &json!([0, 1, 2]));
    assert!(matches!(dense, Some(ModelError::NoMoeLayers)), "{dense:?}");
    let logits = find_error_with("qwen3_moe", "output_router_logits", &json!(true));
    assert!(logits.is_none(), "{logits:?}");
}

/// Checks that keys that do not change the computation are accepted in config.json. Configs of the
/// Hugging Face Hub have such keys.
#[test]
fn config_keys_without_effect_are_accepted() {
    let long_rope =
        |rope_type: &str| json!({"type": rope_type, "factor": 4.0, "original_max_position_embeddings": 16});
    for (name, key, value) in [
        (LLAMA, "bos_token_id", json!(5)),
        (LLAMA, "eos_token_id", json!([5, 6])),
        (LLAMA, "dtype", json!("bfloat16")),
        (LLAMA, "torch_dtype", json!("float16")),
        (LLAMA, "head_dim", json!(null)),
        (LLAMA, "partial_rotary_factor", json!(1.0)),
        // SmolLM2 and models of Unsloth.
        (LLAMA, "is_llama_config", json!(true)),
        (LLAMA, "rope_interleaved", json!(false)),
        (LLAMA, "transformers.js_config", json!({"kv_cache_dtype": {"q4f16": "float16"}})),
        (LLAMA, "unsloth_version", json!("2025.1")),
        (LLAMA, "temperature", json!(0.6)),
        ("mistral_window", "sliding_window", json!(null)),
        // Qwen 2.5.
        ("qwen2", "use_mrope", json!(false)),
        ("qwen2", "rope_parameters", long_rope("yarn")),
        ("qwen2", "rope_parameters", json!({"type": "dynamic", "factor": 2.0})),
        // DistilGPT-2 and larger GPT-2 models.
        ("gpt2", "_num_labels", json!(1)),
        ("gpt2", "n_special", json!(0)),
        ("gpt2", "predict_special_tokens", json!(true)),
        ("gpt2", "task_specific_params", json!({"text-generation": {"max_length": 50}})),
    ] {
        let error = find_error_with(name, key, &value);
        assert!(error.is_none(), "{name}: {key}: {value}: {error:?}");
    }
}

#[test]
fn rope_keys_of_transformers_4_are_accepted() {
    let error = find_build_error("llama_llama3", |c| {
        let mut rope = c.remove("rope_parameters").unwrap();
        let theta = rope.as_object_mut().unwrap().remove("rope_theta").unwrap();
        c.insert("rope_theta".into(), theta);
        c.insert("rope_scaling".into(), rope);
    });
    assert!(error.is_none(), "{error:?}");
}

/// Checks that a model with the Gemma 3 config of transformers 4 trains with the same bits. In this
/// config, the base frequencies of global and local RoPE have separate keys, and a pattern selects
/// the sliding-window layers.
#[test]
fn gemma3_of_transformers_4_trains_with_the_same_bits() {
    let dir = tempfile::tempdir().unwrap();
    let mut config = read_json(&golden_model_directory("gemma3").join("config.json"));
    let map = config.as_object_mut().unwrap();
    for key in ["rope_parameters", "layer_types", "_sliding_window_pattern"] {
        map.remove(key);
    }
    map.insert("rope_theta".into(), json!(10000.0));
    map.insert("rope_local_base_freq".into(), json!(100.0));
    map.insert("rope_scaling".into(), json!({"rope_type": "linear", "factor": 8.0}));
    map.insert("sliding_window_pattern".into(), json!(3));
    std::fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
    std::fs::copy(
        golden_model_directory("gemma3").join("model.safetensors"),
        dir.path().join("model.safetensors"),
    )
    .unwrap();
    let run = |directory: &Path| {
        let spec = create_train_spec(create_pretrained_model_spec(directory), 3, 4, 1, 13);
        run_on_ranks(2, |c| train_steps(&mut start_from_pretrained(&spec, c), 2)).remove(0)
    };
    assert_eq!(run(dir.path()), run(&golden_model_directory("gemma3")));
}

/// Checks that GPT-2 of the Hugging Face Hub is loaded with one notice. It has tensor names without
/// prefix, causal masks among its weights, and dropout rates in config.json.
#[test]
fn gpt2_of_the_hub_is_loaded_with_one_notice_about_its_masks() {
    let dir = tempfile::tempdir().unwrap();
    let mut config = read_json(&golden_model_directory("gpt2").join("config.json"));
    for key in ["attn_pdrop", "embd_pdrop", "resid_pdrop"] {
        config[key] = json!(0.1);
    }
    std::fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
    let file = std::fs::read(golden_model_directory("gpt2").join("model.safetensors")).unwrap();
    let mut tensors = golden::parse_safetensors_with_shapes(&file);
    for (name, _) in &mut tensors {
        *name = name.strip_prefix("transformer.").unwrap().to_owned();
    }
    for layer in 0..2 {
        tensors.push((format!("h.{layer}.attn.bias"), (vec![1, 1, 32, 32], vec![1.0; 1024])));
        tensors.push((format!("h.{layer}.attn.masked_bias"), (vec![], vec![-1e4])));
    }
    std::fs::write(dir.path().join("model.safetensors"), golden::encode_safetensors(&tensors)).unwrap();
    let run = |directory: &Path, dropout: Option<f64>| {
        let spec =
            create_train_spec(ModelSpec { dropout, ..create_pretrained_model_spec(directory) }, 3, 4, 1, 13);
        run_on_ranks(2, |c| {
            let mut pretrained =
                PretrainedModel::open(spec.model.from.as_deref(), c.as_ref()).unwrap().unwrap();
            let mut ready = build_trainer(&spec, c, 1);
            let mut notices = Vec::new();
            let mut collect = |event| match event {
                FromWorker::Event(Event::Notice { message, .. }) => {
                    notices.push(message);
                    Ok(())
                }
                other => panic!("{other:?}"),
            };
            pretrained.load_pretrained_weights(&mut ready, &mut collect).unwrap();
            let config = ready.trainer.model.hf_config().clone();
            (train_steps(&mut ready.start_at_position(Cursor::default()), 2), notices, config)
        })
        .remove(0)
    };
    let (losses, notices, config) = run(dir.path(), None);
    let (golden_losses, ..) = run(&golden_model_directory("gpt2"), Some(0.1));
    assert_eq!(losses, golden_losses, "the rates of config.json have the effect of `train.model.dropout`");
    assert_notices_match_snapshot("golden_families_gpt2_masks", &notices, dir.path());
    assert_eq!(config["embd_pdrop"], 0.1);

    tensors.retain(|(name, _)| name != "h.1.ln_2.bias");
    std::fs::write(dir.path().join("model.safetensors"), golden::encode_safetensors(&tensors)).unwrap();
    let spec = create_train_spec(create_pretrained_model_spec(dir.path()), 3, 4, 1, 13);
    let errors = run_on_ranks(1, |c| {
        let mut pretrained = PretrainedModel::open(spec.model.from.as_deref(), c.as_ref()).unwrap().unwrap();
        pretrained.load_pretrained_weights(&mut build_trainer(&spec, c, 1), &mut |_| Ok(())).unwrap_err()
    });
    assert_eq!(errors[0].code(), RESUME_MODEL_MISMATCH);
    let missing = errors[0].diagnostic().field("missing").unwrap();
    assert_eq!(*missing, serde_json::json!(["transformer.h.1.ln_2.bias"]));
}

/// Checks training of models that job.yaml describes, of the families whose configs differ most
/// from Llama's.
#[test]
fn new_models_train_with_the_same_bits_on_every_world_size() {
    for family in ["gpt2", "gemma2", "gemma3_text"] {
        let model =
            ModelSpec { family: family.into(), tie_word_embeddings: true, ..create_odd_sized_model() };
        let heads = ModelSpec { num_key_value_heads: 3, ..model.clone() };
        let model = if family == "gpt2" { heads } else { model };
        let run = |world, stage| {
            let spec = create_train_spec(model.clone(), stage, 4, 1, 13);
            run_on_ranks(world, |c| {
                train_steps(&mut build_trainer(&spec, c, 1).start_with_random_params(), 3)
            })
            .remove(0)
        };
        let expected = run(1, 0);
        assert!(expected.windows(2).all(|w| w[0] != w[1]), "{family}: the steps must change something");
        for (world, stage) in [(2, 3), (3, 2)] {
            assert_eq!(run(world, stage), expected, "{family}: world {world}, stage {stage}");
        }
    }
}

#[test]
fn weights_of_another_model_are_rejected() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::copy(golden_model_directory("qwen3").join("config.json"), dir.path().join("config.json"))
        .unwrap();
    std::fs::copy(
        golden_model_directory("qwen2").join("model.safetensors"),
        dir.path().join("model.safetensors"),
    )
    .unwrap();
    let spec = create_train_spec(create_pretrained_model_spec(dir.path()), 3, 2, 1, 13);
    let errors = run_on_ranks(2, |c| {
        let mut pretrained = PretrainedModel::open(spec.model.from.as_deref(), c.as_ref()).unwrap().unwrap();
        pretrained.load_pretrained_weights(&mut build_trainer(&spec, c, 1), &mut |_| Ok(())).unwrap_err()
    });
    assert_eq!(errors[0].code(), RESUME_MODEL_MISMATCH);
    let missing = errors[0].diagnostic().field("missing").unwrap().as_array().unwrap();
    assert!(missing.iter().any(|name| name.as_str().unwrap().ends_with("q_norm.weight")), "{missing:?}");
    assert_eq!(errors[0].diagnostic(), errors[1].diagnostic());
}
