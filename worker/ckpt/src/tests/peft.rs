//! Configurations of adapters: what is understood, and what is refused by name.
use crate::peft::{AdapterConfig, open_adapters};
use serde_json::{Value, json};
use std::fs;

fn with(key: &str, value: Value) -> Result<AdapterConfig, String> {
    let mut config = json!({
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 6, "lora_dropout": 0.1, "bias": "none",
        "target_modules": ["v_proj", "q_proj"], "fan_in_fan_out": false, "init_lora_weights": true,
        "loftq_config": {}, "alpha_pattern": {}, "layers_to_transform": null, "peft_version": "0.21.2",
        "megatron_core": "megatron.core", "use_rslora": false, "qalora_group_size": 16, "exclude_modules": [],
    });
    config[key] = value;
    AdapterConfig::parse(config.as_object().expect("an object"))
}

#[test]
fn the_numbers_are_read_and_written() {
    let config = with("revision", json!("main")).expect("understood");
    assert_eq!((config.rank, config.alpha, config.dropout, config.rslora), (4, 6.0, 0.1, false));
    assert_eq!(config.targets, ["q_proj", "v_proj"]);
    assert_eq!(config.scale(), 1.5);
    assert_eq!(with("use_rslora", json!(true)).expect("understood").scale(), 3.0);
    let again = config.json(Some("base"));
    assert_eq!(again["lora_alpha"], json!(6));
    assert_eq!(again["base_model_name_or_path"], "base");
    assert_eq!(AdapterConfig::parse(again.as_object().expect("an object")), Ok(config));
    let half = AdapterConfig { alpha: 2.5, ..with("r", json!(2)).expect("understood") };
    assert_eq!(half.json(None)["lora_alpha"], json!(2.5));
}

#[test]
fn what_changes_the_arithmetic_is_refused_by_name() {
    for (key, value) in [
        ("use_dora", json!(true)),
        ("modules_to_save", json!(["lm_head"])),
        ("layers_to_transform", json!([1])),
        ("layers_to_transform", json!(1)),
        ("layers_pattern", json!("layers")),
        ("rank_pattern", json!({"q_proj": 8})),
        ("alpha_pattern", json!({"q_proj": 8})),
        ("exclude_modules", json!(["k_proj"])),
        ("bias", json!("lora_only")),
        ("lora_bias", json!(true)),
        ("init_lora_weights", json!("pissa")),
        ("loftq_config", json!({"loftq_bits": 4})),
        ("target_modules", json!(".*q_proj")),
        ("target_modules", json!([])),
        ("target_modules", json!([1])),
        ("target_modules", json!(null)),
        ("target_parameters", json!(["mlp.experts.gate_up_proj"])),
        ("trainable_token_indices", json!([1])),
        ("peft_type", json!("IA3")),
        ("task_type", json!("SEQ_CLS")),
        ("r", json!(0)),
        ("r", json!(1u64 << 40)),
        ("r", json!(2.5)),
        ("lora_alpha", json!(0)),
        ("lora_alpha", json!("x")),
        ("lora_dropout", json!(1)),
        ("use_rslora", json!("yes")),
        ("fan_in_fan_out", json!(1)),
        ("something_new", json!({"a": 1})),
    ] {
        let said = with(key, value.clone()).expect_err(key);
        assert!(said.contains(&format!("`{key}")), "{key}: {value}: {said}");
    }
    for (key, value) in [("something_new", json!(null)), ("another", json!(false)), ("more", json!({}))] {
        assert!(with(key, value).is_ok(), "{key}");
    }
}

#[test]
fn a_folder_without_adapters_is_named() {
    let dir = tempfile::tempdir().expect("directory");
    let said = |what: &str| {
        let e = open_adapters(dir.path()).expect_err(what).to_string();
        assert!(e.contains(what), "{e}");
    };
    said("adapter_model.safetensors or adapter_model.bin");
    assert!(AdapterConfig::read(dir.path()).is_err());
    let header =
        json!({"model.norm.weight": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).to_string();
    let file = [&(header.len() as u64).to_le_bytes(), header.as_bytes(), &[0; 4]].concat();
    fs::write(dir.path().join("adapter_model.safetensors"), &file).expect("file");
    said("model.norm.weight, which is no adapter's matrix");
    fs::write(dir.path().join("adapter_model.safetensors"), &file[..20]).expect("file");
    said("adapter_model.safetensors");
    for text in ["[]", "{", "{\"peft_type\": \"LORA\"}"] {
        fs::write(dir.path().join("adapter_config.json"), text).expect("file");
        assert!(AdapterConfig::read(dir.path()).is_err(), "{text}");
    }
}
