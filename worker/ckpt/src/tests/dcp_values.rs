//! Tests the hyper-parameters of torch distributed checkpoints (DCP) that are stored as tensors.
use super::external::open_external;
use super::make_memory_dir;
use super::torch_values::{TestValue, encode_pickle, encode_torch_file};
use serde_json::json;
use std::fs;

const METADATA_MODULE: &str = "torch.distributed.checkpoint.metadata";
const DATA_FILE: &str = "__0_0.distcp";

/// Describes the entry `value` in the form in which `.metadata` does: a tensor with one chunk, or a
/// pickled value.
fn describe_entry(value: &TestValue) -> TestValue {
    let TestValue::Tensor(shape, _) = value else {
        return TestValue::Object(METADATA_MODULE, "BytesStorageMetadata", vec![]);
    };
    let chunk =
        vec![("offsets", TestValue::Size(vec![0; shape.len()])), ("sizes", TestValue::Size(shape.clone()))];
    let properties = vec![("dtype", TestValue::Global("torch", "float32"))];
    let tensor = vec![
        ("properties", TestValue::Object(METADATA_MODULE, "TensorProperties", properties)),
        ("size", TestValue::Size(shape.clone())),
        ("chunks", TestValue::List(vec![TestValue::Object(METADATA_MODULE, "ChunkStorageMetadata", chunk)])),
    ];
    TestValue::Object(METADATA_MODULE, "TensorStorageMetadata", tensor)
}

/// Writes a torch distributed checkpoint with these entries, named by their flattened keys.
fn write_checkpoint(directory: &std::path::Path, entries: Vec<(&str, TestValue)>) {
    let (mut data, mut described, mut stored) = (Vec::new(), Vec::new(), Vec::new());
    for (key, value) in entries {
        let bytes = encode_torch_file(&value);
        let mut index = vec![("fqn", TestValue::Str(key.to_owned()))];
        if let TestValue::Tensor(shape, _) = &value {
            index.push(("offset", TestValue::Size(vec![0; shape.len()])));
        }
        let info = vec![
            ("relative_path", TestValue::Str(DATA_FILE.to_owned())),
            ("offset", TestValue::Int(data.len() as i64)),
            ("length", TestValue::Int(bytes.len() as i64)),
        ];
        stored.push((
            TestValue::Object(METADATA_MODULE, "MetadataIndex", index),
            TestValue::Object("torch.distributed.checkpoint.filesystem", "_StorageInfo", info),
        ));
        described.push((TestValue::Str(key.to_owned()), describe_entry(&value)));
        data.extend(bytes);
    }
    let metadata =
        vec![("state_dict_metadata", TestValue::Dict(described)), ("storage_data", TestValue::Dict(stored))];
    let pickle = encode_pickle(&TestValue::Object(METADATA_MODULE, "Metadata", metadata));
    fs::write(directory.join(".metadata"), pickle).expect("written");
    fs::write(directory.join(DATA_FILE), data).expect("written");
}

#[test]
fn hyper_parameters_that_are_tensors_become_numbers_and_lists() {
    let tensor = |values: &[f32]| TestValue::Tensor(vec![values.len() as u64], values.to_vec());
    let scalar = |value: f32| TestValue::Tensor(vec![], vec![value]);
    let dir = make_memory_dir();
    write_checkpoint(
        dir.path(),
        vec![
            ("w", tensor(&[1.0, 2.0])),
            ("optimizer.state.w.exp_avg", tensor(&[3.0, 4.0])),
            ("optimizer.state.w.exp_avg_sq", tensor(&[5.0, 6.0])),
            ("optimizer.state.w.step", scalar(7.0)),
            ("optimizer.param_groups.0.params", TestValue::List(vec![TestValue::Str("w".into())])),
            ("optimizer.param_groups.0.lr", scalar(1e-3)),
            ("optimizer.param_groups.0.betas", tensor(&[0.9, 0.95])),
            ("optimizer.param_groups.0.eps", scalar(f32::INFINITY)),
            ("optimizer.param_groups.0.momentum.0", scalar(0.5)),
            ("optimizer.param_groups.0.momentum.1", TestValue::Int(2)),
            ("optimizer.param_groups.0.empty", tensor(&[])),
            ("optimizer.param_groups.0.table", tensor(&[0.0; 2000])),
            ("optimizer.param_groups.0.decays", TestValue::List(vec![scalar(0.1), scalar(0.2)])),
        ],
    );
    let found = open_external(dir.path()).expect("whole");
    let state = &found.facts().state;
    assert_eq!((state.groups.len(), state.steps["w"]), (1, 7));
    assert_eq!(state.groups[0].names, ["w"]);
    let hyper = json!({
        "lr": 1e-3, "betas": [0.9, 0.95], "eps": "inf", "momentum": [0.5, 2], "empty": [],
    });
    assert_eq!(serde_json::Value::Object(state.groups[0].hyper.clone()), hyper);
    let ignored: Vec<&str> = ["decays", "table"]
        .into_iter()
        .filter(|key| found.facts().notices.iter().any(|notice| notice.contains(key)))
        .collect();
    assert_eq!((ignored, found.facts().notices.len()), (vec!["decays", "table"], 2));
}
