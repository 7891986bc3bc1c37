//! Every family against real transformers and torch, from folders that `save_pretrained` made (tests/golden/families/README.md):
//! logits, loss, every gradient, ten AdamW steps; the same bits for any number of workers; and what is refused.
#![allow(clippy::unwrap_used)] // a test that panics has failed
mod common;
use ckpt::{Checkpoint, Dtype, GatherOptions};
use common::{
    families::{CASES, folder, from, load, started},
    golden::{self, json},
    *,
};
use contract::job::ModelSpec;
use serde_json::{Value, json};
use std::{path::Path, sync::Arc};
use worker::{
    resume::{PretrainedModel, resume},
    stages::Cursor,
};

#[test]
fn logits_gradients_and_steps() {
    for name in CASES {
        println!("{name}");
        golden::check(&load(name), |case| started(&case.spec, Arc::new(comm::local::group(1).remove(0))));
    }
}

#[test]
fn any_world_and_stage() {
    for (i, name) in CASES.into_iter().enumerate() {
        let spec = |stage| {
            let mut s = train_spec(from(&folder(name)), stage, 6, 1, 13);
            s.steps = 4;
            s
        };
        let run = |stage, world| {
            let all = on_ranks(world, |c| steps(&mut started(&spec(stage), c), 3));
            assert!(all.iter().all(|r| *r == all[0]), "ranks disagree");
            all.into_iter().next().unwrap()
        };
        let expected = run(0, 1);
        let mut again = spec(3);
        again.recompute = contract::job::Recompute::Block;
        let recomputed = on_ranks(2, |c| steps(&mut started(&again, c), 3)).remove(0);
        assert_eq!(recomputed, expected, "{name}: recomputed");
        for stage in 0..=3 {
            // half of the pairs, and the other half with the next case; all of them with one model: bit_equal.rs
            for world in (1..=4).filter(|world| (world + usize::from(stage) + i).is_multiple_of(2)) {
                assert_eq!(run(stage, world), expected, "{name}: world {world}, stage {stage}");
            }
        }
    }
}

/// Loads the folder on `world` ranks, takes no step, saves and gathers into `out`.
fn through(folder: &Path, world: usize, out: &Path, dtype: Dtype) {
    let dir = tempfile::tempdir().unwrap();
    let spec = train_spec(from(folder), 3, 4, 1, 13);
    let job = job(&spec, dir.path(), false);
    on_ranks(world, |c| {
        let mut running = started(&spec, c);
        let mut saver = saver(&running, &job, dir.path());
        saver.begin(&mut running).unwrap();
        assert_eq!(saver.finish(&running).unwrap().unwrap().step, 0);
    });
    let checkpoint = Checkpoint::open(&dir.path().join("step-00000000")).unwrap();
    let options = GatherOptions { dtype: Some(dtype), ..GatherOptions::default() };
    ckpt::gather(&checkpoint, out, &options, |_, _| {}).unwrap();
}

#[test]
fn weights_that_no_step_has_changed_come_out_with_their_bits() {
    for (i, name) in CASES.into_iter().enumerate() {
        let dir = tempfile::tempdir().unwrap();
        let (world, first) = (1 + i % 4, dir.path().join("first"));
        let weights = |folder: &Path| std::fs::read(folder.join("model.safetensors")).unwrap();
        through(&folder(name), world, &first, Dtype::F32);
        let bits = |file: &[u8]| -> Vec<(String, Vec<u32>)> {
            let all = golden::tensors(file).into_iter();
            all.map(|(name, x)| (name, x.iter().map(|x| x.to_bits()).collect())).collect()
        };
        assert_eq!(bits(&weights(&first)), bits(&weights(&folder(name))), "{name}");
        assert_eq!(json(&first.join("config.json")), json(&folder(name).join("config.json")), "{name}");

        // And so do rounded ones; a folder without F32 has them exactly.
        let (second, third) = (dir.path().join("second"), dir.path().join("third"));
        through(&folder(name), 1, &second, Dtype::BF16);
        through(&second, 3, &third, Dtype::BF16);
        assert_eq!(weights(&second), weights(&third), "{name}");
        assert_eq!(json(&third.join("config.json"))["dtype"], "bfloat16");
    }
}

#[test]
fn resumed_runs_go_on_with_the_same_bits() {
    let names =
        ["gemma3", "gpt2", "llama_biases_tied", "mistral_window", "mixtral", "qwen2", "qwen3", "qwen3_moe"];
    for name in names {
        let spec = |stage| train_spec(from(&folder(name)), stage, 6, 1, 13);
        let whole = on_ranks(1, |c| steps(&mut started(&spec(0), c), 5)).remove(0);
        let dir = tempfile::tempdir().unwrap();
        on_ranks(3, |c| {
            let mut running = started(&spec(3), c);
            steps(&mut running, 3);
            let mut saver = saver(&running, &job(&spec(3), dir.path(), false), dir.path());
            saver.begin(&mut running).unwrap();
            saver.finish(&running).unwrap();
        });
        let after = on_ranks(2, |c| {
            let mut bound = build(&spec(1), c, 1);
            let job = job(&spec(1), dir.path(), false);
            let layout = worker::storage_layout::StorageLayout::shared(bound.trainer.engine.world());
            let place =
                worker::resume::CheckpointDirs { root: dir.path(), workdir: dir.path(), layout: &layout };
            let resumed = resume(&mut bound, &job, &place, "made up", &mut |_| Ok(()));
            let cursor = resumed.unwrap().unwrap().cursor;
            steps(&mut bound.start_at(cursor), 2)
        });
        assert_eq!(after, [&whole[3..], &whole[3..]], "{name}");
    }
}

/// What building the model of a configuration says.
fn refused(name: &str, change: impl Fn(&mut serde_json::Map<String, Value>)) -> String {
    let dir = tempfile::tempdir().unwrap();
    let mut config = json(&folder(name).join("config.json"));
    change(config.as_object_mut().unwrap());
    std::fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
    worker::model::build(&from(dir.path()), 16).err().unwrap_or_default()
}

#[test]
fn what_is_not_supported_is_refused_by_name() {
    let with = |name: &str, key: &str, value: Value| {
        refused(name, |c| {
            c.insert(key.into(), value.clone());
        })
    };
    for (key, value, said) in [
        ("hidden_act", json!("gelu"), "`hidden_act: \"gelu\"` is not supported"),
        ("attention_dropout", json!(1), "`attention_dropout` is 1, not a number from 0 to below 1"),
        ("attention_dropout", json!(-0.1), "`attention_dropout` is -0.1, not a number"),
        ("attention_dropout", json!("0.1"), "`attention_dropout` is \"0.1\", not a number"),
        ("resid_pdrop", json!(0.1), "`resid_pdrop: 0.1`"),
        ("pretraining_tp", json!(2), "`pretraining_tp: 2`"),
        ("partial_rotary_factor", json!(0.5), "`partial_rotary_factor: 0.5`"),
        ("rope_interleaved", json!(true), "`rope_interleaved: true`"),
        ("quantization_config", json!({"bits": 4}), "`quantization_config: {\"bits\":4}`"),
        ("logits_scaling", json!(2.0), "`logits_scaling: 2.0`"),
        ("sliding_window", json!(8), "`sliding_window: 8`"),
        ("architectures", json!(["NewForCausalLM"]), "architectures [NewForCausalLM] are not supported"),
        ("architectures", json!(null), "architectures [] are not supported"),
        ("model_type", json!("qwen2"), "`model_type: qwen2` is not that of LlamaForCausalLM"),
        ("rope_parameters", json!({"rope_type": "longrope", "factor": 2}), "\"longrope\" is not supported"),
        (
            "rope_scaling",
            json!({"type": "linear", "factor": 2}),
            "`rope_scaling` and `rope_parameters` differ",
        ),
        ("num_key_value_heads", json!(3), "num_key_value_heads 3 does not divide"),
        ("head_dim", json!(5), "head_dim 5 is odd"),
        ("vocab_size", json!(-1), "`vocab_size` is -1, not a number"),
        ("vocab_size", json!(1u64 << 40), "not a number from 1 to"),
        ("hidden_size", json!(null), "config.json has no `hidden_size`"),
        ("rms_norm_eps", json!(0), "`rms_norm_eps` is 0, not above 0"),
        ("tie_word_embeddings", json!("yes"), "`tie_word_embeddings` is \"yes\", not true or false"),
        ("num_hidden_layers", json!(1 << 20), "num_hidden_layers 1048576 is more than"),
    ] {
        let found = with("llama_biases_tied", key, value);
        assert!(found.contains(said), "{key}: {found}");
    }
    for (name, key, value, said) in [
        ("mixtral", "num_experts_per_tok", json!(9), "num_experts_per_tok 9 is more than the 8 experts"),
        ("mixtral", "router_jitter_noise", json!(0.1), "`router_jitter_noise: 0.1` is not supported"),
        ("mixtral", "router_aux_loss_coef", json!(-1), "`router_aux_loss_coef` is -1, below 0"),
        ("mixtral", "num_local_experts", json!(null), "config.json has no `num_local_experts`"),
        ("mixtral", "num_local_experts", json!(1 << 20), "more than 65536"),
        ("mixtral", "shared_expert_intermediate_size", json!(8), "`shared_expert_intermediate_size: 8`"),
        ("qwen3_moe", "num_experts", json!(7), "`num_experts` and `num_local_experts` differ"),
        ("qwen3_moe", "mlp_only_layers", json!([3]), "`mlp_only_layers` is no list of layers below 3"),
        ("qwen3_moe", "mlp_only_layers", json!([0, 1, 2]), "leave no layer with experts"),
        ("qwen3_moe", "norm_topk_prob", json!(1), "`norm_topk_prob` is 1, not true or false"),
    ] {
        let found = with(name, key, value);
        assert!(found.contains(said), "{name} {key}: {found}");
    }
    assert_eq!(with("qwen3_moe", "output_router_logits", json!(true)), "");
    let types = with("qwen2_sliding_layers", "layer_types", json!(["full_attention", "chunked_attention"]));
    assert!(types.contains("`layer_types`"), "{types}");
    for (name, key, value, said) in [
        ("gpt2", "activation_function", json!("relu"), "`activation_function: \"relu\"`"),
        ("gpt2", "add_cross_attention", json!(true), "`add_cross_attention: true`"),
        (
            "gpt2",
            "attn_pdrop",
            json!(1.5),
            "`attn_pdrop` is 1.5, not a number from 0 to below 1; `train.model.dropout`",
        ),
        ("gpt2", "resid_pdrop", json!(null), "`resid_pdrop` is null, not a number"),
        ("gpt2", "n_head", json!(3), "n_head 3 does not divide n_embd 20"),
        ("gpt2", "rope_theta", json!(1e4), "`rope_theta: 10000.0`"),
        ("gpt2", "scale_attn_weights", json!(1), "`scale_attn_weights` is 1, not true or false"),
        ("gemma2", "hidden_activation", json!("gelu"), "`hidden_activation: \"gelu\"`"),
        ("gemma2", "use_bidirectional_attention", json!(true), "`use_bidirectional_attention: true`"),
        ("gemma2", "final_logit_softcapping", json!(-1), "`final_logit_softcapping` is -1, not above 0"),
        ("gemma3", "attn_logit_softcapping", json!(50.0), "`attn_logit_softcapping: 50.0`"),
        ("gemma3", "rope_scaling", json!({"type": "linear", "factor": 8}), "`rope_scaling` stands beside"),
        (
            "gemma3",
            "rope_parameters",
            json!({"rope_type": "default"}),
            "`rope_parameters` is not `full_attention`",
        ),
    ] {
        let found = with(name, key, value);
        assert!(found.contains(said), "{name}, {key}: {found}");
    }
    let off = with("qwen2_sliding_layers", "use_sliding_window", json!(false));
    assert!(off.contains("sliding layers without a window"), "{off}");
}

/// Keys that folders of the Hub have beside those that families need.
#[test]
fn what_changes_no_arithmetic_is_taken() {
    let long = |kind: &str| json!({"type": kind, "factor": 4.0, "original_max_position_embeddings": 16});
    for (name, key, value) in [
        ("llama_biases_tied", "bos_token_id", json!(5)),
        ("llama_biases_tied", "eos_token_id", json!([5, 6])),
        ("llama_biases_tied", "dtype", json!("bfloat16")),
        ("llama_biases_tied", "torch_dtype", json!("float16")),
        ("llama_biases_tied", "head_dim", json!(null)),
        ("llama_biases_tied", "partial_rotary_factor", json!(1.0)),
        // SmolLM2
        ("llama_biases_tied", "is_llama_config", json!(true)),
        ("llama_biases_tied", "rope_interleaved", json!(false)),
        ("llama_biases_tied", "transformers.js_config", json!({"kv_cache_dtype": {"q4f16": "float16"}})),
        ("llama_biases_tied", "unsloth_version", json!("2025.1")),
        ("llama_biases_tied", "temperature", json!(0.6)),
        ("mistral_window", "sliding_window", json!(null)),
        // Qwen 2.5
        ("qwen2", "use_mrope", json!(false)),
        ("qwen2", "rope_parameters", long("yarn")),
        ("qwen2", "rope_parameters", json!({"type": "dynamic", "factor": 2.0})),
        // DistilGPT-2 and the larger ones
        ("gpt2", "_num_labels", json!(1)),
        ("gpt2", "n_special", json!(0)),
        ("gpt2", "predict_special_tokens", json!(true)),
        ("gpt2", "task_specific_params", json!({"text-generation": {"max_length": 50}})),
    ] {
        let found = refused(name, |c| {
            c.insert(key.into(), value.clone());
        });
        assert_eq!(found, "", "{name}: {key}: {value}");
    }
}

#[test]
fn names_of_older_versions_mean_the_same() {
    let old = refused("llama_llama3", |c| {
        let mut rope = c.remove("rope_parameters").unwrap();
        let theta = rope.as_object_mut().unwrap().remove("rope_theta").unwrap();
        c.insert("rope_theta".into(), theta);
        c.insert("rope_scaling".into(), rope);
    });
    assert_eq!(old, "");
}

/// Gemma 3 as transformers 4 wrote it: bases of both rotations by themselves, layers by a pattern.
#[test]
fn a_gemma_of_older_versions_is_the_same_model() {
    let dir = tempfile::tempdir().unwrap();
    let mut config = json(&folder("gemma3").join("config.json"));
    let map = config.as_object_mut().unwrap();
    for key in ["rope_parameters", "layer_types", "_sliding_window_pattern"] {
        map.remove(key);
    }
    map.insert("rope_theta".into(), json!(10000.0));
    map.insert("rope_local_base_freq".into(), json!(100.0));
    map.insert("rope_scaling".into(), json!({"rope_type": "linear", "factor": 8.0}));
    map.insert("sliding_window_pattern".into(), json!(3));
    std::fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
    std::fs::copy(folder("gemma3").join("model.safetensors"), dir.path().join("model.safetensors")).unwrap();
    let run = |folder: &Path| {
        let spec = train_spec(from(folder), 3, 4, 1, 13);
        on_ranks(2, |c| steps(&mut started(&spec, c), 2)).remove(0)
    };
    assert_eq!(run(dir.path()), run(&folder("gemma3")));
}

/// The Hub's own GPT-2: names without their prefix, causal masks among the weights, dropout in config.json.
#[test]
fn gpt2_as_the_hub_has_it() {
    let dir = tempfile::tempdir().unwrap();
    let mut config = json(&folder("gpt2").join("config.json"));
    for key in ["attn_pdrop", "embd_pdrop", "resid_pdrop"] {
        config[key] = json!(0.1);
    }
    std::fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
    let file = std::fs::read(folder("gpt2").join("model.safetensors")).unwrap();
    let mut all = golden::tensors_with_shapes(&file);
    for (name, _) in &mut all {
        *name = name.strip_prefix("transformer.").unwrap().to_owned();
    }
    for layer in 0..2 {
        all.push((format!("h.{layer}.attn.bias"), (vec![1, 1, 32, 32], vec![1.0; 1024])));
        all.push((format!("h.{layer}.attn.masked_bias"), (vec![], vec![-1e4])));
    }
    std::fs::write(dir.path().join("model.safetensors"), golden::safetensors(&all)).unwrap();
    let model = |folder: &Path| ModelSpec { dropout: Some(0.1), ..from(folder) };
    let run = |folder: &Path| {
        let own = folder == dir.path();
        let model = if own { from(folder) } else { model(folder) };
        let spec = train_spec(model, 3, 4, 1, 13);
        on_ranks(2, |c| {
            let mut origin = PretrainedModel::open(spec.model.from.as_deref(), c.as_ref()).unwrap().unwrap();
            let mut bound = build(&spec, c, 1);
            let mut said = Vec::new();
            let mut tell = |event| {
                said.push(format!("{event:?}"));
                Ok(())
            };
            origin.load(&mut bound, &mut tell).unwrap();
            let config = bound.trainer.model.hf_config().clone();
            (steps(&mut bound.start_at(Cursor::default()), 2), said, config)
        })
        .remove(0)
    };
    let (losses, said, config) = run(dir.path());
    assert_eq!(losses, run(&folder("gpt2")).0, "its own rates, and the job's");
    assert!(said.len() == 1 && said[0].contains("h.0.attn.bias"), "{said:?}");
    assert_eq!(config["embd_pdrop"], 0.1);

    all.retain(|(name, _)| name != "h.1.ln_2.bias");
    std::fs::write(dir.path().join("model.safetensors"), golden::safetensors(&all)).unwrap();
    let spec = train_spec(model(dir.path()), 3, 4, 1, 13);
    let lacking = on_ranks(1, |c| {
        let mut origin = PretrainedModel::open(spec.model.from.as_deref(), c.as_ref()).unwrap().unwrap();
        origin.load(&mut build(&spec, c, 1), &mut |_| Ok(())).unwrap_err()
    });
    assert_eq!(lacking[0].code().name(), "resume-model-mismatch");
    let missing = lacking[0].diagnostic().field("missing").unwrap();
    assert_eq!(*missing, serde_json::json!(["transformer.h.1.ln_2.bias"]));
}

/// A described model of each family is one that its own folder describes too, and trains the same on any world.
#[test]
fn new_models_of_every_family() {
    for family in ["gpt2", "gemma2", "gemma3_text"] {
        let model = ModelSpec { family: family.into(), tie_word_embeddings: true, ..odd_model() };
        let heads = ModelSpec { num_key_value_heads: 3, ..model.clone() };
        let model = if family == "gpt2" { heads } else { model };
        let run = |world, stage| {
            let spec = train_spec(model.clone(), stage, 4, 1, 13);
            on_ranks(world, |c| steps(&mut build(&spec, c, 1).start_fresh(), 3)).remove(0)
        };
        let expected = run(1, 0);
        assert!(expected.windows(2).all(|w| w[0] != w[1]), "{family}: the steps must change something");
        for (world, stage) in [(2, 3), (3, 2)] {
            assert_eq!(run(world, stage), expected, "{family}: world {world}, stage {stage}");
        }
    }
}

#[test]
fn weights_of_another_model_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::copy(folder("qwen3").join("config.json"), dir.path().join("config.json")).unwrap();
    std::fs::copy(folder("qwen2").join("model.safetensors"), dir.path().join("model.safetensors")).unwrap();
    let spec = train_spec(from(dir.path()), 3, 2, 1, 13);
    let said = on_ranks(2, |c| {
        let mut origin = PretrainedModel::open(spec.model.from.as_deref(), c.as_ref()).unwrap().unwrap();
        origin.load(&mut build(&spec, c, 1), &mut |_| Ok(())).unwrap_err()
    });
    assert_eq!(said[0].code().name(), "resume-model-mismatch");
    let missing = said[0].diagnostic().field("missing").unwrap().as_array().unwrap();
    assert!(missing.iter().any(|name| name.as_str().unwrap().ends_with("q_norm.weight")), "{missing:?}");
    assert_eq!(said[0].diagnostic(), said[1].diagnostic());
}
