//! Loads the golden cases of all model families. `save_pretrained` of transformers wrote their
//! directories (tests/golden/families/README.md).
use super::{
    golden::{GoldenCase, parse_golden_case, read_json},
    *,
};
use std::path::PathBuf;
use worker::{checkpoint::resume::PretrainedModel, train::running_trainer::Cursor};

/// Returns the directory names of the golden cases of all model families, sorted.
pub(crate) fn list_family_cases() -> Vec<String> {
    let entries = std::fs::read_dir(golden_model_directory("")).unwrap().map(|entry| entry.unwrap());
    let directories = entries.filter(|entry| entry.path().is_dir());
    let mut names: Vec<String> = directories.map(|d| d.file_name().into_string().unwrap()).collect();
    names.sort();
    assert!(names.len() >= 18, "golden cases are missing: {names:?}");
    names
}

/// Returns the directory of the golden model `name`.
pub(crate) fn golden_model_directory(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/families").join(name)
}

/// Creates the `train.model` section for a pretrained model in `directory`. The sizes in the
/// section match no golden case, so a test fails if they are used instead of those of the
/// directory.
pub(crate) fn create_pretrained_model_spec(directory: &Path) -> ModelSpec {
    ModelSpec {
        from: Some(directory.to_path_buf()),
        rms_norm_eps: 1e-5,
        vocab_size: 0,
        ..create_odd_sized_model()
    }
}

/// Reads the golden case `name` of a model family.
pub(crate) fn load_family_case(name: &str) -> GoldenCase {
    let dir = golden_model_directory(name);
    let about = read_json(&dir.join("case.json"));
    parse_golden_case(
        &about,
        create_pretrained_model_spec(&dir),
        &std::fs::read(dir.join("answers.safetensors")).unwrap(),
    )
}

/// Starts a run at step 0 with the weights of the pretrained model. Each rank reads its shards.
/// Collective: every rank of the group must call it.
pub(crate) fn start_from_pretrained(spec: &TrainSpec, comm: Arc<dyn Comm>) -> RunningTrainer {
    let mut pretrained = PretrainedModel::open(spec.model.from.as_deref(), comm.as_ref()).unwrap().unwrap();
    let mut ready = build_trainer(spec, comm, 1);
    pretrained.load_pretrained_weights(&mut ready, &mut |event| panic!("{event:?}")).unwrap();
    ready.start_at_position(Cursor::default())
}
