//! Tests reading the configurations of LoRA adapters (adapter_config.json of PEFT). Supported
//! settings are parsed, and errors name unsupported settings.
use super::format_error;
use crate::error::AdapterConfigError;
use crate::layout::peft::{AdapterConfig, open_peft_adapters};
use serde_json::{Value, json};
use std::fs;

fn parse_config_with(key: &str, value: Value) -> Result<AdapterConfig, AdapterConfigError> {
    let mut config = json!({
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 6, "lora_dropout": 0.1, "bias": "none",
        "target_modules": ["v_proj", "q_proj"], "fan_in_fan_out": false, "init_lora_weights": true,
        "loftq_config": {}, "alpha_pattern": {}, "layers_to_transform": null, "peft_version": "0.21.2",
        "megatron_core": "megatron.core", "use_rslora": false, "qalora_group_size": 16, "exclude_modules": [],
    });
    config[key] = value;
    AdapterConfig::parse_object(config.as_object().expect("an object"))
}

#[test]
fn a_config_is_parsed_and_written() {
    let config = parse_config_with("revision", json!("main")).expect("understood");
    assert_eq!((config.rank, config.alpha, config.dropout, config.use_rslora), (4, 6.0, 0.1, false));
    assert_eq!(config.targets, ["q_proj", "v_proj"]);
    assert_eq!(config.output_scale(), 1.5);
    assert_eq!(parse_config_with("use_rslora", json!(true)).expect("understood").output_scale(), 3.0);
    let again = config.to_json(Some("base"));
    assert_eq!(again["lora_alpha"], json!(6));
    assert_eq!(again["base_model_name_or_path"], "base");
    assert_eq!(AdapterConfig::parse_object(again.as_object().expect("an object")), Ok(config));
    let half = AdapterConfig { alpha: 2.5, ..parse_config_with("r", json!(2)).expect("understood") };
    assert_eq!(half.to_json(None)["lora_alpha"], json!(2.5));
}

#[test]
fn unsupported_settings_are_rejected_by_name() {
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
        let rejected = match parse_config_with(key, value.clone()).expect_err(key) {
            AdapterConfigError::Unsupported { key, .. } | AdapterConfigError::Invalid { key, .. } => key,
            AdapterConfigError::NoTargets => "target_modules".to_owned(),
            other => panic!("{key}: {value}: {other:?}"),
        };
        assert_eq!(rejected, key, "{value}");
    }
    for (key, value) in [("something_new", json!(null)), ("another", json!(false)), ("more", json!({}))] {
        assert!(parse_config_with(key, value).is_ok(), "{key}");
    }
}

#[test]
fn directories_without_valid_adapters_are_rejected() {
    let dir = tempfile::tempdir().expect("directory");
    let expect_open_error =
        || format_error(&open_peft_adapters(dir.path()).expect_err("rejected"), dir.path());
    let mut lines = vec![expect_open_error()];
    assert!(AdapterConfig::read(dir.path()).is_err());
    let header =
        json!({"model.norm.weight": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).to_string();
    let file = [&(header.len() as u64).to_le_bytes(), header.as_bytes(), &[0; 4]].concat();
    fs::write(dir.path().join("adapter_model.safetensors"), &file).expect("file");
    lines.push(expect_open_error());
    fs::write(dir.path().join("adapter_model.safetensors"), &file[..20]).expect("file");
    lines.push(expect_open_error());
    insta::assert_snapshot!("peft_invalid_adapters", lines.join("\n"));
    for text in ["[]", "{", "{\"peft_type\": \"LORA\"}"] {
        fs::write(dir.path().join("adapter_config.json"), text).expect("file");
        assert!(AdapterConfig::read(dir.path()).is_err(), "{text}");
    }
}
