//! The golden cases of every family, as `save_pretrained` made their folders (tests/golden/families/README.md).
use super::{
    golden::{Case, case, json},
    *,
};
use std::path::PathBuf;
use worker::{resume::PretrainedModel, stages::Cursor};

pub(crate) const CASES: [&str; 18] = [
    "gemma2",
    "gemma3",
    "gpt2",
    "gpt2_packed",
    "llama_biases_tied",
    "llama_linear",
    "llama_llama3",
    "mistral_window",
    "mistral_packed",
    "qwen2",
    "qwen2_sliding_layers",
    "qwen2_yarn",
    "qwen3",
    "qwen3_biases",
    "mixtral",
    "mixtral_window",
    "qwen3_moe",
    "qwen3_moe_sparse_step",
];

pub(crate) fn folder(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/families").join(name)
}

/// The model of a folder; numbers that job.yaml would give are those of no golden folder.
pub(crate) fn from(folder: &Path) -> ModelSpec {
    ModelSpec { from: Some(folder.to_path_buf()), rms_norm_eps: 1e-5, vocab_size: 0, ..odd_model() }
}

pub(crate) fn load(name: &str) -> Case {
    let dir = folder(name);
    let about = json(&dir.join("case.json"));
    case(&about, from(&dir), &std::fs::read(dir.join("answers.safetensors")).unwrap())
}

/// A run at step 0 with the folder's weights, each rank's part read by itself.
pub(crate) fn started(spec: &TrainSpec, comm: Arc<dyn Comm>) -> RunningTrainer {
    let mut origin = PretrainedModel::open(spec.model.from.as_deref(), comm.as_ref()).unwrap().unwrap();
    let mut bound = build(spec, comm, 1);
    origin.load(&mut bound, &mut |event| panic!("{event:?}")).unwrap();
    bound.start_at(Cursor::default())
}
