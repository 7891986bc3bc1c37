//! The golden cases of all model families: directories that `save_pretrained` of Transformers wrote
//! (tests/golden/families/README.md).
use super::{
    golden::{Case, parse_case, read_json},
    *,
};
use std::path::PathBuf;
use worker::{resume::PretrainedModel, stages::Cursor};

/// The directories of the cases.
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

/// The directory of the case `name`.
pub(crate) fn golden_directory(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/families").join(name)
}

/// The `train.model` section for a pretrained model in `directory`. Its own sizes match no golden
/// case, so a test fails if they are used instead of the directory's.
pub(crate) fn pretrained_spec(directory: &Path) -> ModelSpec {
    ModelSpec { from: Some(directory.to_path_buf()), rms_norm_eps: 1e-5, vocab_size: 0, ..odd_model() }
}

/// Reads the case `name`.
pub(crate) fn load_case(name: &str) -> Case {
    let dir = golden_directory(name);
    let about = read_json(&dir.join("case.json"));
    parse_case(&about, pretrained_spec(&dir), &std::fs::read(dir.join("answers.safetensors")).unwrap())
}

/// A run at step 0 with the weights of the pretrained model; each rank reads its shards.
pub(crate) fn start_from_pretrained(spec: &TrainSpec, comm: Arc<dyn Comm>) -> RunningTrainer {
    let mut pretrained = PretrainedModel::open(spec.model.from.as_deref(), comm.as_ref()).unwrap().unwrap();
    let mut ready = build_trainer(spec, comm, 1);
    pretrained.load(&mut ready, &mut |event| panic!("{event:?}")).unwrap();
    ready.start_at(Cursor::default())
}
