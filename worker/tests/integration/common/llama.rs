//! Loads the golden cases of the Llama family (tests/golden/llama/README.md).
use super::{
    golden::{GoldenCase, parse_golden_case, read_json},
    *,
};
use jobspec::ModelSpec;
use std::path::PathBuf;

/// Reads the golden case `name` of the Llama family.
pub(crate) fn load_llama_case(name: &str) -> GoldenCase {
    let dir = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/llama").join(name);
    let config = read_json(&dir.join("config.json"));
    let n = |key: &str| config[key].as_u64().unwrap() as u32;
    let model = ModelSpec {
        from: None,
        dropout: None,
        family: "llama".into(),
        vocab_size: n("vocab_size"),
        hidden_size: n("hidden_size"),
        intermediate_size: n("intermediate_size"),
        num_hidden_layers: n("num_hidden_layers"),
        num_attention_heads: n("num_attention_heads"),
        num_key_value_heads: n("num_key_value_heads"),
        head_dim: n("head_dim"),
        num_experts: None,
        num_experts_per_tok: None,
        moe_intermediate_size: None,
        max_position_embeddings: n("max_position_embeddings"),
        rms_norm_eps: config["rms_norm_eps"].as_f64().unwrap(),
        rope_theta: config["rope_parameters"]["rope_theta"].as_f64().unwrap(),
        tie_word_embeddings: config["tie_word_embeddings"].as_bool().unwrap(),
        initializer_range: 0.02,
    };
    parse_golden_case(
        &read_json(&dir.join("case.json")),
        model,
        &std::fs::read(dir.join("tensors.safetensors")).unwrap(),
    )
}

/// Starts a run of one rank at step 0 with the golden weights.
pub(crate) fn start_with_golden_weights(case: &GoldenCase) -> RunningTrainer {
    let comm = Arc::new(comm::thread_comm::create_thread_group(1).remove(0));
    let running = build_trainer(&case.spec, comm, 1).start_with_random_params();
    let engine = &running.trainer.engine;
    for (u, s) in engine.shards.iter().enumerate() {
        engine.with_resident_params(u, |p| {
            for (i, spec) in s.unit.params.iter().enumerate() {
                p.host_slice_mut()[s.unit.tensor_range(i)].copy_from_slice(&case.tensors[&spec.name]);
            }
        });
        engine.refresh_compute_copy(u);
    }
    running
}
