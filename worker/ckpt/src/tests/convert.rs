//! Tests that conversions keep every bit for any shapes, groups, stages and numbers of ranks, and
//! use bounded memory.
use super::{list_entry_names, make_memory_dir, read_tree};
use crate::catalog::{F32ReadRequest, ParamGroup, PassthroughState, TensorSource};
use crate::codec::pickle::PythonObject;
use crate::convert::{ConvertNotice, ConvertOptions, ConvertTarget, convert_checkpoint};
use crate::error::{CkptError, ConvertError, Result, UnsupportedFeature};
use crate::open::{OpenedCheckpoint, open_checkpoint};
use crate::tensor::TensorRole;
use crate::{Dtype, TensorInfo, TiedWeight, TrainingState};
use proptest::prelude::*;
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};

/// A source checkpoint of a conversion whose training state is in memory instead of files.
#[derive(Clone, Debug)]
struct MemorySource {
    path: PathBuf,
    tensors: Vec<(TensorInfo, Vec<f32>)>,
    state: TrainingState,
    passthrough: PassthroughState,
}

impl TensorSource for MemorySource {
    fn training_state(&self) -> TrainingState {
        self.state.clone()
    }
    fn path(&self) -> &Path {
        &self.path
    }
    fn tensors(&self) -> Vec<TensorInfo> {
        self.tensors.iter().map(|(t, _)| t.clone()).collect()
    }
    fn read_verified(&self, requests: &mut [F32ReadRequest<'_>]) -> Result<()> {
        for r in requests {
            let is_requested = |(t, _): &&(TensorInfo, Vec<f32>)| t.name == r.name && t.role == r.role;
            let (_, values) = self.tensors.iter().find(is_requested).expect("a known tensor");
            let from = r.start_element as usize;
            r.out.copy_from_slice(&values[from..from + r.out.len()]);
        }
        Ok(())
    }
    fn read_passthrough(&self) -> Result<PassthroughState> {
        Ok(self.passthrough.clone())
    }
    fn completed_steps(&self) -> Option<u64> {
        Some(5)
    }
}

/// Computes `n` numbers from `seed`, all of which BF16 and F16 represent exactly.
fn make_half_exact_values(seed: u64, n: u64) -> Vec<f32> {
    (0..n).map(|i| ((i * 31 + seed * 17) % 251) as f32 / 8.0 - 13.0).collect()
}

/// Makes a source checkpoint of a conversion at `path`, with a buffer of dtype F16. `groups` has
/// the shapes of the weights of each parameter group, and `frozen` the shapes of the frozen
/// weights.
fn make_memory_source(path: &Path, groups: &[Vec<Vec<u64>>], frozen: &[Vec<u64>]) -> MemorySource {
    let (state, passthrough) = (TrainingState::default(), PassthroughState::default());
    let mut made = MemorySource { path: path.to_owned(), tensors: Vec::new(), state, passthrough };
    let mut seed = 0;
    let mut add = |name: &str, role, dtype, shape: &[u64]| {
        seed += 1;
        let info = TensorInfo { name: name.into(), role, dtype, shape: shape.to_vec() };
        let values = make_half_exact_values(seed, info.element_count());
        made.tensors.push((info, values));
    };
    for (g, shapes) in groups.iter().enumerate() {
        let mut group = ParamGroup::default();
        for (i, shape) in shapes.iter().enumerate() {
            let name = format!("g{g}.p{i}");
            for role in [TensorRole::Weight, TensorRole::ExpAvg, TensorRole::ExpAvgSq] {
                add(&name, role, Dtype::F32, shape);
            }
            group.names.push(name);
            // as if the second group had been added to the optimizer one step later
            group.steps.push(Some(if g == 1 { 3.0 } else { 4.0 }));
        }
        group.options = vec![
            ("lr".into(), PythonObject::Float(0.1 * (g + 1) as f64)),
            ("betas".into(), PythonObject::Tuple(vec![PythonObject::Float(0.9), PythonObject::Float(0.99)])),
        ];
        made.passthrough.groups.push(group);
    }
    for (i, shape) in frozen.iter().enumerate() {
        add(&format!("frozen{i}"), TensorRole::Weight, Dtype::BF16, shape);
    }
    add("buffer", TensorRole::Buffer, Dtype::F16, &[3]);
    made.tensors.sort_by_key(|(t, _)| t.role);
    made.passthrough.precision = Some(Dtype::BF16);
    made.state.ties = vec![TiedWeight { alias: "alias".into(), target: "g0.p0".into() }];
    made.passthrough.scheduler = PythonObject::dict_from_pairs([("last_epoch", PythonObject::Int(5))]);
    made
}

/// Makes options for a conversion to `to` with this stage and number of ranks.
pub(super) fn make_convert_options(to: ConvertTarget, stage: u8, world: u32) -> ConvertOptions {
    ConvertOptions { stage: Some(stage), world: Some(world), ..ConvertOptions::new(to) }
}

/// Opens the checkpoint at `path`, of any format. Panics if opening fails.
pub(super) fn open_source(path: &Path) -> Box<dyn TensorSource> {
    match open_checkpoint(path).expect("a checkpoint") {
        OpenedCheckpoint::Native(newest) => Box::new(newest.checkpoint),
        OpenedCheckpoint::External(checkpoint) => checkpoint,
    }
}

/// Asserts that two sources have bit-equal tensors, and equal ties and update counts. If `dtypes`
/// is true, also asserts equal dtypes, hyper-parameters and schedulers.
fn assert_same_state(a: &dyn TensorSource, b: &dyn TensorSource, dtypes: bool) {
    let key = |t: &TensorInfo| (t.role, t.name.clone(), t.shape.clone(), dtypes.then_some(t.dtype));
    let sorted = |s: &dyn TensorSource| {
        let mut keys: Vec<_> = s.tensors().iter().map(key).collect();
        keys.sort_by(|x, y| (x.0, &x.1).cmp(&(y.0, &y.1)));
        keys
    };
    assert_eq!(sorted(a), sorted(b));
    for t in a.tensors() {
        let read = |s: &dyn TensorSource| {
            let mut out = vec![f32::NAN; t.element_count() as usize];
            let request = F32ReadRequest { name: &t.name, role: t.role, start_element: 0, out: &mut out };
            s.read_verified(&mut [request]).expect("readable");
            out.iter().map(|x| x.to_bits()).collect::<Vec<_>>()
        };
        assert_eq!(read(a), read(b), "{}/{}", t.role, t.name);
    }
    assert_eq!(
        (a.training_state().ties, read_updates_by_group(a)),
        (b.training_state().ties, read_updates_by_group(b))
    );
    if dtypes {
        let (x, y) = (a.read_passthrough().expect("known"), b.read_passthrough().expect("known"));
        assert_eq!(x.scheduler, y.scheduler);
        let lr = |e: &PassthroughState| {
            let rate_and_betas = |g: &ParamGroup| {
                g.options.iter().filter(|(k, _)| k == "lr" || k == "betas").cloned().collect()
            };
            e.groups.iter().map(rate_and_betas).collect::<Vec<Vec<_>>>()
        };
        assert_eq!(lr(&x), lr(&y));
    }
}

/// Returns, for each parameter group, the names and update counts of its weights.
fn read_updates_by_group(source: &dyn TensorSource) -> Vec<Vec<(String, Option<f64>)>> {
    let (state, passthrough) = (source.training_state(), source.read_passthrough().expect("known"));
    let native = state.groups.iter().map(|g| ParamGroup::from_info(g, &state.steps));
    let groups = if passthrough.groups.is_empty() { native.collect() } else { passthrough.groups };
    groups.into_iter().map(|g| g.names.into_iter().zip(g.steps).collect()).collect()
}

/// Generates the shapes of one to five tensors, with zero to three dimensions each.
fn generate_shapes() -> impl Strategy<Value = Vec<Vec<u64>>> {
    proptest::collection::vec(proptest::collection::vec(1u64..9, 0..4), 1..6)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]
    #[test]
    fn every_stage_and_world_size_keeps_every_bit(
        groups in proptest::collection::vec(generate_shapes(), 1..4),
        frozen in proptest::collection::vec(proptest::collection::vec(1u64..9, 1..3), 0..3),
        stage in 1u8..4, world in 1u32..6, second in 1u8..4, other in 1u32..6, sub_group_size in 1u64..60,
    ) {
        let dir = make_memory_dir();
        let at = |name: &str| dir.path().join(name);
        fs::create_dir(at("made")).expect("made");
        let source = make_memory_source(&at("made"), &groups, &frozen);
        let first = ConvertOptions { sub_group_size, ..make_convert_options(ConvertTarget::DeepSpeed, stage, world) };
        let report = convert_checkpoint(&source, &at("a"), &first, |_, _| {}).expect("converted");
        prop_assert_eq!((report.stage, report.world, report.step), (Some(stage), world, 5));
        assert_same_state(&source, &*open_source(&at("a")), true);
        // convert the result
        convert_checkpoint(&*open_source(&at("a")), &at("b"), &make_convert_options(ConvertTarget::DeepSpeed, second, other), |_, _| {}).expect("converted");
        assert_same_state(&source, &*open_source(&at("b")), true);
        convert_checkpoint(&*open_source(&at("b")), &at("n"), &make_convert_options(ConvertTarget::Native, stage, other), |_, _| {}).expect("converted");
        assert_same_state(&source, &*open_source(&at("n")), false);
        prop_assert!(crate::verify_checkpoints(&at("n")).expect("there").is_sound());
        // convert native to DeepSpeed
        let back = ConvertOptions { dtype: Some(Dtype::BF16), ..make_convert_options(ConvertTarget::DeepSpeed, second, world) };
        convert_checkpoint(&*open_source(&at("n")), &at("c"), &back, |_, _| {}).expect("converted");
        assert_same_state(&source, &*open_source(&at("c")), false);
        prop_assert_eq!(list_entry_names(dir.path()), ["a", "b", "c", "made", "n"], "no temporary files remain");
    }
}

/// Returns the [`ConvertError`] that `error` contains. Panics if `error` contains no such error.
pub(super) fn expect_convert_error(error: &CkptError) -> &ConvertError {
    match error {
        CkptError::Unsupported { feature: UnsupportedFeature::Convert(error), .. } => error,
        other => panic!("{other:?}"),
    }
}

/// Returns the path of the golden checkpoint `name`, which another program has saved.
pub(super) fn golden_path(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name)
}

#[test]
fn golden_zero_checkpoints_keep_all_state_in_every_stage() {
    for name in ["z1_tied", "z2_aligned", "z2_frozen", "z3_frozen"] {
        let source = open_source(&golden_path(name));
        for (stage, world) in [(1, 3), (2, 1), (3, 2)] {
            let dir = make_memory_dir();
            let out = dir.path().join("out");
            convert_checkpoint(
                &*source,
                &out,
                &make_convert_options(ConvertTarget::DeepSpeed, stage, world),
                |_, _| {},
            )
            .expect("converted");
            let again = open_source(&out);
            assert_same_state(&*source, &*again, true);
            let (a, b) =
                (source.read_passthrough().expect("known"), again.read_passthrough().expect("known"));
            // the entries may be in any order, and the entry with the stage may be missing
            let client = |e: &PassthroughState| {
                let mut entries: Vec<_> =
                    e.model_entries.iter().filter(|(k, _)| k != "ds_config").cloned().collect();
                entries.sort_by(|x, y| x.0.cmp(&y.0));
                entries
            };
            assert_eq!(client(&a), client(&b), "{name}: entries of the client");
            let options =
                |e: &PassthroughState| e.groups.iter().map(|g| g.options.clone()).collect::<Vec<_>>();
            assert_eq!((options(&a), a.optimizer_entries), (options(&b), b.optimizer_entries), "{name}");
            assert!(out.join("latest").exists() && again.completed_steps() == source.completed_steps());
        }
    }
}

#[test]
fn golden_checkpoints_of_every_layout_convert_to_every_target() {
    for name in ["hf_ddp/checkpoint-3", "fsdp2_sharded", "dcp", "z0", "universal_z2", "universal_z3"] {
        let source = open_source(&golden_path(name));
        let dir = make_memory_dir();
        for (target, stage, world) in [
            (ConvertTarget::DeepSpeed, 2, 3),
            (ConvertTarget::DeepSpeed, 3, 2),
            (ConvertTarget::Universal, 2, 1),
            (ConvertTarget::Native, 2, 3),
        ] {
            let out = dir.path().join(format!("{target:?}-{stage}"));
            convert_checkpoint(&*source, &out, &make_convert_options(target, stage, world), |_, _| {})
                .expect("converted");
            let again = open_source(&out);
            assert_same_state(&*source, &*again, false);
            // DeepSpeed counts an initial update by zeros for 16-bit training at stage 0
            let step = if name == "z0" && target == ConvertTarget::Native {
                Some(4)
            } else {
                source.completed_steps()
            };
            assert_eq!(again.completed_steps(), step, "{name} to {target:?}");
            let (a, b) = (source.training_state(), again.training_state());
            assert_eq!(a.samples, b.samples, "{name} to {target:?}");
            let names_and_decay = |s: &TrainingState| -> Vec<_> {
                let decay = |g: &crate::ParamGroupInfo| g.hyper.get("weight_decay").and_then(Value::as_f64);
                s.groups.iter().map(|g| (g.names.clone(), decay(g))).collect()
            };
            assert_eq!(
                (names_and_decay(&a).len(), names_and_decay(&a)),
                (2, names_and_decay(&b)),
                "{name} to {target:?}"
            );
            if target != ConvertTarget::Native {
                assert_eq!((&a.steps, &a.scheduler), (&b.steps, &b.scheduler), "{name} to {target:?}");
            }
        }
    }
}

/// Checks conversions of sources whose parameter groups list no names. Each weight must keep its
/// update count, both with a single group and with several groups, of which the weight's group is
/// unknown.
#[test]
fn updates_stay_with_their_weights_where_groups_have_no_names() {
    for (groups, to) in
        [(2, ConvertTarget::Native), (1, ConvertTarget::Universal), (1, ConvertTarget::Native)]
    {
        let dir = make_memory_dir();
        let at = |name: &str| dir.path().join(name);
        fs::create_dir(at("made")).expect("made");
        let mut source = make_memory_source(&at("made"), &[vec![vec![3]], vec![vec![2, 2]]], &[]);
        for group in &mut source.passthrough.groups {
            let steps = group.steps.drain(..).map(|s| s.expect("known") as u64);
            source.state.steps.extend(group.names.drain(..).zip(steps));
        }
        source.passthrough.groups.truncate(groups);
        convert_checkpoint(&source, &at("out"), &ConvertOptions::new(to), |_, _| {}).expect("converted");
        let steps = open_source(&at("out")).training_state().steps;
        assert_eq!((steps["g0.p0"], steps["g1.p0"]), (4, 3), "{groups} groups to {to:?}");
    }
}

/// Checks for every target format that a conversion keeps the number of consumed samples, and does
/// not invent a number if the source checkpoint has none.
#[test]
fn the_sample_count_is_kept_or_absent() {
    let dir = make_memory_dir();
    for (name, samples) in
        [("z2_padded", Some(24)), ("universal_z2", Some(12)), ("hf_ddp/checkpoint-3", None)]
    {
        let source = open_source(&golden_path(name));
        assert_eq!(source.training_state().samples, samples, "{name}");
        for target in [ConvertTarget::DeepSpeed, ConvertTarget::Universal, ConvertTarget::Native] {
            let out = dir.path().join(format!("{}-{target:?}", name.len()));
            convert_checkpoint(&*source, &out, &ConvertOptions::new(target), |_, _| {}).expect("converted");
            assert_eq!(open_source(&out).training_state().samples, samples, "{name} to {target:?}");
        }
    }
}

/// Checks that a native checkpoint, and a DeepSpeed checkpoint converted from the native one, keep
/// the FP16 loss scale. DeepSpeed's step count includes skipped steps.
#[test]
fn the_loss_scale_and_skipped_steps_are_kept() {
    let dir = make_memory_dir();
    let at = |name: &str| dir.path().join(name);
    fs::create_dir(at("made")).expect("made");
    let mut source = make_memory_source(&at("made"), &[vec![vec![3], vec![2, 2]]], &[]);
    source.state.loss_scaler = serde_json::json!({"scale": 512.0, "_growth_tracker": 9});
    let report =
        convert_checkpoint(&source, &at("n"), &make_convert_options(ConvertTarget::Native, 2, 1), |_, _| {})
            .expect("converted");
    let expected = ConvertNotice::StepFromUpdates { updates: 4, steps: 5 };
    assert!(report.notices.contains(&expected), "{:?}", report.notices);
    let ours = open_source(&at("n"));
    assert_eq!(
        (ours.completed_steps(), ours.training_state().parse_loss_scale()),
        (Some(4), source.state.parse_loss_scale())
    );
    for stage in [2, 3] {
        let out = at(&format!("z{stage}"));
        convert_checkpoint(
            &*ours,
            &out,
            &make_convert_options(ConvertTarget::DeepSpeed, stage, 2),
            |_, _| {},
        )
        .expect("converted");
        let again = open_source(&out);
        assert_eq!(
            again.training_state().parse_loss_scale(),
            source.state.parse_loss_scale(),
            "stage {stage}"
        );
        assert_same_state(&source, &*again, false);
        assert!(crate::verify_checkpoints(&out).expect("a report").warnings.is_empty(), "stage {stage}");
    }
}

#[test]
fn integer_buffers_keep_their_bits_in_deepspeed_layouts() {
    let source = open_source(&golden_path("z3_buffers"));
    let dir = make_memory_dir();
    for (i, target) in [ConvertTarget::DeepSpeed, ConvertTarget::Universal].into_iter().enumerate() {
        let out = dir.path().join(i.to_string());
        convert_checkpoint(&*source, &out, &make_convert_options(target, 2, 2), |_, _| {})
            .expect("converted");
        let expected = 123_456_789_012i64.to_le_bytes();
        let found = read_tree(&out).into_iter().any(|(_, content)| content.windows(8).any(|w| w == expected));
        assert!(found, "{target:?}");
    }
    let report = convert_checkpoint(
        &*source,
        &dir.path().join("n"),
        &make_convert_options(ConvertTarget::Native, 2, 2),
        |_, _| {},
    );
    let expected = ConvertNotice::BuffersLeftOut { names: vec!["tokens_seen".into()] };
    let report = report.expect("converted");
    assert!(report.notices.contains(&expected), "{:?}", report.notices);
}

/// Copies `model.safetensors` of a golden checkpoint, and no other file, to the new directory
/// `weights` in `dir`. Returns the path of the new directory.
pub(super) fn copy_golden_weights(dir: &Path, golden_name: &str) -> PathBuf {
    let weights = dir.join("weights");
    fs::create_dir(&weights).expect("made");
    fs::copy(golden_path(golden_name).join("model.safetensors"), weights.join("model.safetensors"))
        .expect("copied");
    weights
}

/// Checks the conversion of weights without a training state to a native checkpoint, and resharding
/// of the result. Both checkpoints must have only weights, and every conversion must give a notice.
#[test]
fn weights_only_become_a_native_checkpoint_of_weights_only() {
    let dir = make_memory_dir();
    let weights = copy_golden_weights(dir.path(), "hf_ddp/checkpoint-3");
    let (out, again) = (dir.path().join("out"), dir.path().join("again"));
    let made = convert_checkpoint(
        &*open_source(&weights),
        &out,
        &make_convert_options(ConvertTarget::Native, 2, 3),
        |_, _| {},
    )
    .expect("converted");
    assert!(made.step == 0 && made.notices.contains(&ConvertNotice::WeightsOnly), "{made:?}");
    let resharded = convert_checkpoint(
        &*open_source(&out),
        &again,
        &make_convert_options(ConvertTarget::Native, 2, 1),
        |_, _| {},
    )
    .expect("converted");
    assert!(resharded.notices.contains(&ConvertNotice::WeightsOnly), "{resharded:?}");
    let original = open_source(&weights);
    for path in [&out, &again] {
        assert!(crate::verify_checkpoints(path).expect("a report").is_sound());
        let found = open_source(path);
        assert!(found.has_only_weights() && found.training_state().frozen.is_empty());
        assert_eq!(found.tensors().len(), original.tensors().len());
        for info in original.tensors() {
            let read = |source: &dyn TensorSource| {
                let mut out = vec![0f32; info.element_count() as usize];
                let role = TensorRole::Weight;
                let request = F32ReadRequest { name: &info.name, role, start_element: 0, out: &mut out };
                source.read_verified(&mut [request]).expect("sound");
                out.into_iter().map(f32::to_bits).collect::<Vec<_>>()
            };
            assert_eq!(read(&*found), read(&*original), "{}", info.name);
        }
    }
    // with a file of a training state, the source is a training state that lost its optimizer
    fs::copy(golden_path("hf_ddp").join("checkpoint-3/scheduler.pt"), weights.join("scheduler.pt"))
        .expect("copied");
    fs::copy(
        golden_path("hf_ddp").join("checkpoint-3/trainer_state.json"),
        weights.join("trainer_state.json"),
    )
    .expect("copied");
    assert!(!open_source(&weights).has_only_weights());
}

/// A source checkpoint of a conversion that contains one weight and its Adam moments. Every element
/// is 1.5, so that even a large source needs no memory. The fields are the description of the
/// weight and the path of the source.
struct ConstantSource(TensorInfo, PathBuf);

impl TensorSource for ConstantSource {
    fn training_state(&self) -> TrainingState {
        TrainingState::default()
    }
    fn path(&self) -> &Path {
        &self.1
    }
    fn tensors(&self) -> Vec<TensorInfo> {
        let with_role = |role| TensorInfo { role, ..self.0.clone() };
        [TensorRole::Weight, TensorRole::ExpAvg, TensorRole::ExpAvgSq].map(with_role).to_vec()
    }
    fn read_verified(&self, requests: &mut [F32ReadRequest<'_>]) -> Result<()> {
        requests.iter_mut().for_each(|r| r.out.fill(1.5));
        Ok(())
    }
    fn completed_steps(&self) -> Option<u64> {
        Some(1)
    }
}

/// Converts a source of 1.0 GB with a memory limit of 64 MiB, in a child process. Checks that the
/// peak memory of the child process is below 96 MiB.
#[test]
fn memory_stays_within_the_limit_for_any_size() {
    if crate::tests::read_child_argument().is_none() {
        let name = "tests::convert::memory_stays_within_the_limit_for_any_size";
        let child = crate::tests::run_child_test(name, "child");
        assert!(child.status.success(), "{child:?}");
        return;
    }
    let dir = tempfile::tempdir().expect("a directory");
    let (name, role, dtype) = ("w".to_owned(), TensorRole::Weight, Dtype::F32);
    let source =
        ConstantSource(TensorInfo { name, role, dtype, shape: vec![80, 1 << 20] }, dir.path().join("source"));
    fs::create_dir(&source.1).expect("made");
    let task = ConvertOptions { memory: 64 << 20, ..make_convert_options(ConvertTarget::DeepSpeed, 2, 1) };
    let report = convert_checkpoint(&source, &dir.path().join("out"), &task, |_, _| {}).expect("converted");
    assert!(report.bytes > 1 << 30);
    let status = fs::read_to_string("/proc/self/status").expect("Linux");
    let peak = status.lines().find_map(|l| l.strip_prefix("VmHWM:")).expect("a line").trim();
    let peak: u64 = peak.trim_end_matches(" kB").parse().expect("a number");
    assert!(peak < 96 << 10, "{peak} kB");
}
