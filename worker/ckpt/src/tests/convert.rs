//! Conversions: what is written is read again bit for bit, whatever the shapes, groups, stage and world; a kill loses
//! nothing that was finished; memory doesn't grow with the checkpoint.
use super::{fast_dir, files, names};
use crate::catalog::Role;
use crate::convert::{ConvertOptions, Target, convert};
use crate::error::{CkptError, Result};
use crate::passthrough::{Extras, ParamGroup};
use crate::pickle::Object;
use crate::root::{Found, find};
use crate::source::{Request, Source};
use crate::{Dtype, TensorInfo, Tie, TrainingState};
use proptest::prelude::*;
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};

/// A training state in memory.
#[derive(Clone, Debug)]
struct Made {
    path: PathBuf,
    tensors: Vec<(TensorInfo, Vec<f32>)>,
    state: TrainingState,
    extras: Extras,
}

impl Source for Made {
    fn state(&self) -> TrainingState {
        self.state.clone()
    }
    fn path(&self) -> &Path {
        &self.path
    }
    fn tensors(&self) -> Vec<TensorInfo> {
        self.tensors.iter().map(|(t, _)| t.clone()).collect()
    }
    fn read_many(&self, requests: &mut [Request<'_>]) -> Result<()> {
        for r in requests {
            let of = |(t, _): &&(TensorInfo, Vec<f32>)| t.name == r.name && t.role == r.role;
            let (_, values) = self.tensors.iter().find(of).expect("a known tensor");
            let from = r.start_element as usize;
            r.out.copy_from_slice(&values[from..from + r.out.len()]);
        }
        Ok(())
    }
    fn extras(&self) -> Result<Extras> {
        Ok(self.extras.clone())
    }
    fn step(&self) -> Option<u64> {
        Some(5)
    }
}

/// Values that are exact in 16 bits as well.
fn values(seed: u64, n: u64) -> Vec<f32> {
    (0..n).map(|i| ((i * 31 + seed * 17) % 251) as f32 / 8.0 - 13.0).collect()
}

/// Groups of parameters with these shapes, frozen weights and a buffer of a 16-bit type.
fn made(path: &Path, groups: &[Vec<Vec<u64>>], frozen: &[Vec<u64>]) -> Made {
    let (state, extras) = (TrainingState::default(), Extras::default());
    let mut made = Made { path: path.to_owned(), tensors: Vec::new(), state, extras };
    let mut seed = 0;
    let mut add = |name: &str, role, dtype, shape: &[u64]| {
        seed += 1;
        let info = TensorInfo { name: name.into(), role, dtype, shape: shape.to_vec() };
        let values = values(seed, info.elements());
        made.tensors.push((info, values));
    };
    for (g, shapes) in groups.iter().enumerate() {
        let mut group = ParamGroup::default();
        for (i, shape) in shapes.iter().enumerate() {
            let name = format!("g{g}.p{i}");
            for role in [Role::Weight, Role::ExpAvg, Role::ExpAvgSq] {
                add(&name, role, Dtype::F32, shape);
            }
            group.names.push(name);
            // another group joined later
            group.steps.push(Some(if g == 1 { 3.0 } else { 4.0 }));
        }
        group.options = vec![
            ("lr".into(), Object::Float(0.1 * (g + 1) as f64)),
            ("betas".into(), Object::Tuple(vec![Object::Float(0.9), Object::Float(0.99)])),
        ];
        made.extras.groups.push(group);
    }
    for (i, shape) in frozen.iter().enumerate() {
        add(&format!("frozen{i}"), Role::Weight, Dtype::BF16, shape);
    }
    add("buffer", Role::Buffer, Dtype::F16, &[3]);
    made.tensors.sort_by_key(|(t, _)| t.role);
    made.extras.precision = Some(Dtype::BF16);
    made.state.ties = vec![Tie { alias: "alias".into(), target: "g0.p0".into() }];
    made.extras.scheduler = Object::dict([("last_epoch", Object::Int(5))]);
    made
}

fn options(to: Target, stage: u8, world: u32) -> ConvertOptions {
    ConvertOptions { stage: Some(stage), world: Some(world), ..ConvertOptions::to(to) }
}

fn open(path: &Path) -> Box<dyn Source> {
    match find(path).expect("a checkpoint") {
        Found::Native(newest) => Box::new(newest.checkpoint),
        Found::Foreign(foreign) => foreign,
    }
}

/// Asserts that two sources hold the same tensors, bit for bit, and the same of what is beside them.
fn assert_same(a: &dyn Source, b: &dyn Source, dtypes: bool) {
    let key = |t: &TensorInfo| (t.role, t.name.clone(), t.shape.clone(), dtypes.then_some(t.dtype));
    let sorted = |s: &dyn Source| {
        let mut keys: Vec<_> = s.tensors().iter().map(key).collect();
        keys.sort_by(|x, y| (x.0, &x.1).cmp(&(y.0, &y.1)));
        keys
    };
    assert_eq!(sorted(a), sorted(b));
    for t in a.tensors() {
        let read = |s: &dyn Source| {
            let mut out = vec![f32::NAN; t.elements() as usize];
            let request = Request { name: &t.name, role: t.role, start_element: 0, out: &mut out };
            s.read_many(&mut [request]).expect("readable");
            out.iter().map(|x| x.to_bits()).collect::<Vec<_>>()
        };
        assert_eq!(read(a), read(b), "{}/{}", t.role, t.name);
    }
    assert_eq!((a.state().ties, updates(a)), (b.state().ties, updates(b)));
    if dtypes {
        let (x, y) = (a.extras().expect("known"), b.extras().expect("known"));
        assert_eq!(x.scheduler, y.scheduler);
        let lr = |e: &Extras| {
            let of = |g: &ParamGroup| {
                g.options.iter().filter(|(k, _)| k == "lr" || k == "betas").cloned().collect()
            };
            e.groups.iter().map(of).collect::<Vec<Vec<_>>>()
        };
        assert_eq!(lr(&x), lr(&y));
    }
}

/// The optimizer's groups, each weight with the updates that it has had.
fn updates(source: &dyn Source) -> Vec<Vec<(String, Option<f64>)>> {
    let (state, extras) = (source.state(), source.extras().expect("known"));
    let own = state.groups.iter().map(|g| ParamGroup::of(g, &state.steps));
    let groups = if extras.groups.is_empty() { own.collect() } else { extras.groups };
    groups.into_iter().map(|g| g.names.into_iter().zip(g.steps).collect()).collect()
}

fn shapes() -> impl Strategy<Value = Vec<Vec<u64>>> {
    proptest::collection::vec(proptest::collection::vec(1u64..9, 0..4), 1..6)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]
    #[test]
    fn every_stage_and_world_holds_the_same(
        groups in proptest::collection::vec(shapes(), 1..4),
        frozen in proptest::collection::vec(proptest::collection::vec(1u64..9, 1..3), 0..3),
        stage in 1u8..4, world in 1u32..6, second in 1u8..4, other in 1u32..6, sub_group_size in 1u64..60,
    ) {
        let dir = fast_dir();
        let at = |name: &str| dir.path().join(name);
        fs::create_dir(at("made")).expect("made");
        let source = made(&at("made"), &groups, &frozen);
        let first = ConvertOptions { sub_group_size, ..options(Target::DeepSpeed, stage, world) };
        let report = convert(&source, &at("a"), &first, |_, _| {}).expect("converted");
        prop_assert_eq!((report.stage, report.world, report.step), (Some(stage), world, 5));
        assert_same(&source, &*open(&at("a")), true);
        // and from what was written
        convert(&*open(&at("a")), &at("b"), &options(Target::DeepSpeed, second, other), |_, _| {}).expect("converted");
        assert_same(&source, &*open(&at("b")), true);
        convert(&*open(&at("b")), &at("n"), &options(Target::Native, stage, other), |_, _| {}).expect("converted");
        assert_same(&source, &*open(&at("n")), false);
        prop_assert!(crate::verify(&at("n")).expect("there").is_sound());
        // ours to DeepSpeed's
        let back = ConvertOptions { dtype: Some(Dtype::BF16), ..options(Target::DeepSpeed, second, world) };
        convert(&*open(&at("n")), &at("c"), &back, |_, _| {}).expect("converted");
        assert_same(&source, &*open(&at("c")), false);
        prop_assert_eq!(names(dir.path()), ["a", "b", "c", "made", "n"], "nothing is left beside");
    }
}

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name)
}

#[test]
fn real_folders_keep_everything_in_every_layout() {
    for name in ["z1_tied", "z2_aligned", "z2_frozen", "z3_frozen"] {
        let source = open(&golden(name));
        for (stage, world) in [(1, 3), (2, 1), (3, 2)] {
            let dir = fast_dir();
            let out = dir.path().join("out");
            convert(&*source, &out, &options(Target::DeepSpeed, stage, world), |_, _| {}).expect("converted");
            let again = open(&out);
            assert_same(&*source, &*again, true);
            let (a, b) = (source.extras().expect("known"), again.extras().expect("known"));
            // in any order, and without what says the stage
            let client = |e: &Extras| {
                let mut all: Vec<_> = e.model.iter().filter(|(k, _)| k != "ds_config").cloned().collect();
                all.sort_by(|x, y| x.0.cmp(&y.0));
                all
            };
            assert_eq!(client(&a), client(&b), "{name}: what the client keeps");
            let options = |e: &Extras| e.groups.iter().map(|g| g.options.clone()).collect::<Vec<_>>();
            assert_eq!((options(&a), a.optimizer), (options(&b), b.optimizer), "{name}");
            assert!(out.join("latest").exists() && again.step() == source.step());
        }
    }
}

/// Real folders of every other kind, to each format: the same training state.
#[test]
fn real_folders_of_every_kind_are_converted() {
    for name in ["hf_ddp/checkpoint-3", "fsdp2_sharded", "dcp", "z0", "universal_z2", "universal_z3"] {
        let source = open(&golden(name));
        let dir = fast_dir();
        for (target, stage, world) in [
            (Target::DeepSpeed, 2, 3),
            (Target::DeepSpeed, 3, 2),
            (Target::Universal, 2, 1),
            (Target::Native, 2, 3),
        ] {
            let out = dir.path().join(format!("{target:?}-{stage}"));
            convert(&*source, &out, &options(target, stage, world), |_, _| {}).expect("converted");
            let again = open(&out);
            assert_same(&*source, &*again, false);
            // DeepSpeed makes a first update of zeros for 16 bits at stage 0
            let step = if name == "z0" && target == Target::Native { Some(4) } else { source.step() };
            assert_eq!(again.step(), step, "{name} to {target:?}");
            let (a, b) = (source.state(), again.state());
            assert_eq!(a.samples, b.samples, "{name} to {target:?}");
            let told = |s: &TrainingState| -> Vec<_> {
                let decay = |g: &crate::Group| g.hyper.get("weight_decay").and_then(Value::as_f64);
                s.groups.iter().map(|g| (g.names.clone(), decay(g))).collect()
            };
            assert_eq!((told(&a).len(), told(&a)), (2, told(&b)), "{name} to {target:?}");
            if target != Target::Native {
                assert_eq!((&a.steps, &a.scheduler), (&b.steps, &b.scheduler), "{name} to {target:?}");
            }
        }
    }
}

/// Groups that don't say their names: each weight keeps the updates that it has had, whether one group has them all or nobody knows.
#[test]
fn updates_stay_with_their_weights_where_groups_have_no_names() {
    for (groups, to) in [(2, Target::Native), (1, Target::Universal), (1, Target::Native)] {
        let dir = fast_dir();
        let at = |name: &str| dir.path().join(name);
        fs::create_dir(at("made")).expect("made");
        let mut source = made(&at("made"), &[vec![vec![3]], vec![vec![2, 2]]], &[]);
        for group in &mut source.extras.groups {
            let steps = group.steps.drain(..).map(|s| s.expect("known") as u64);
            source.state.steps.extend(group.names.drain(..).zip(steps));
        }
        source.extras.groups.truncate(groups);
        convert(&source, &at("out"), &ConvertOptions::to(to), |_, _| {}).expect("converted");
        let steps = open(&at("out")).state().steps;
        assert_eq!((steps["g0.p0"], steps["g1.p0"]), (4, 3), "{groups} groups to {to:?}");
    }
}

/// Where the data stood goes along as far as it is known: a number that nobody wrote would be taken for one.
#[test]
fn samples_are_those_of_the_source_or_none() {
    let dir = fast_dir();
    for (name, samples) in
        [("z2_padded", Some(24)), ("universal_z2", Some(12)), ("hf_ddp/checkpoint-3", None)]
    {
        let source = open(&golden(name));
        assert_eq!(source.state().samples, samples, "{name}");
        for target in [Target::DeepSpeed, Target::Universal, Target::Native] {
            let out = dir.path().join(format!("{}-{target:?}", name.len()));
            convert(&*source, &out, &ConvertOptions::to(target), |_, _| {}).expect("converted");
            assert_eq!(open(&out).state().samples, samples, "{name} to {target:?}");
        }
    }
}

/// fp16's loss scale goes along to a run of ours, and from there to DeepSpeed, whose steps include those that were skipped.
#[test]
fn the_loss_scale_and_skipped_steps_go_along() {
    let dir = fast_dir();
    let at = |name: &str| dir.path().join(name);
    fs::create_dir(at("made")).expect("made");
    let mut source = made(&at("made"), &[vec![vec![3], vec![2, 2]]], &[]);
    source.state.loss_scaler = serde_json::json!({"scale": 512.0, "_growth_tracker": 9});
    let report = convert(&source, &at("n"), &options(Target::Native, 2, 1), |_, _| {}).expect("converted");
    let said = report.notices.join("\n");
    assert!(said.contains("has done 4 updates in 5 steps: a run goes on at step 4"), "{said}");
    let ours = open(&at("n"));
    assert_eq!((ours.step(), ours.state().loss_scale()), (Some(4), source.state.loss_scale()));
    for stage in [2, 3] {
        let out = at(&format!("z{stage}"));
        convert(&*ours, &out, &options(Target::DeepSpeed, stage, 2), |_, _| {}).expect("converted");
        let again = open(&out);
        assert_eq!(again.state().loss_scale(), source.state.loss_scale(), "stage {stage}");
        assert_same(&source, &*again, false);
        assert!(crate::verify(&out).expect("a report").warnings.is_empty(), "stage {stage}");
    }
}

/// Each byte of the source is read once, and checked all the same: also where a kill left finished files.
#[test]
fn damage_is_found_though_each_byte_is_read_once() {
    for task in
        [options(Target::DeepSpeed, 3, 2), options(Target::Universal, 2, 1), options(Target::Native, 2, 3)]
    {
        let dir = fast_dir();
        let from = dir.path().join("from");
        super::copy_tree(&golden("z2_padded"), &from);
        for (path, bytes) in files(&from) {
            if !path.to_string_lossy().ends_with("optim_states.pt") {
                continue;
            }
            for at in [bytes.len() / 3, bytes.len() / 2] {
                let mut flipped = bytes.clone();
                flipped[at] ^= 0x10;
                fs::write(&path, flipped).expect("written");
                let result = find(&from).and_then(|found| match found {
                    Found::Foreign(source) => convert(&*source, &dir.path().join("out"), &task, |_, _| {}),
                    Found::Native(_) => Err(CkptError::invalid("none of ours")),
                });
                assert!(matches!(result, Err(CkptError::Damaged { .. })), "byte {at}: {result:?}");
                assert!(!dir.path().join("out").exists());
            }
            fs::write(&path, bytes).expect("written");
        }
    }
}

/// Integers keep their bits.
#[test]
fn buffers_of_integers_are_copied_as_they_are() {
    let source = open(&golden("z3_buffers"));
    let dir = fast_dir();
    for (i, target) in [Target::DeepSpeed, Target::Universal].into_iter().enumerate() {
        let out = dir.path().join(i.to_string());
        convert(&*source, &out, &options(target, 2, 2), |_, _| {}).expect("converted");
        let expected = 123_456_789_012i64.to_le_bytes();
        let found = files(&out).into_iter().any(|(_, content)| content.windows(8).any(|w| w == expected));
        assert!(found, "{target:?}");
    }
    let report = convert(&*source, &dir.path().join("n"), &options(Target::Native, 2, 2), |_, _| {});
    assert!(report.expect("converted").notices.iter().any(|n| n.contains("tokens_seen")), "said");
}

#[test]
fn what_was_finished_before_a_kill_is_checked_and_kept() {
    let dir = fast_dir();
    let source = open(&golden("z2_padded"));
    let (whole, out) = (dir.path().join("whole"), dir.path().join("out"));
    let task = options(Target::DeepSpeed, 3, 3);
    convert(&*source, &whole, &task, |_, _| {}).expect("converted");
    // a converter that dies in the middle: at progress, as a kill would, without cleaning up
    let again = convert(&*source, &out, &task, |_, _| {}).expect("converted");
    assert_eq!(again.reused, 0);
    let hidden = dir.path().join(".out.converting");
    let kill = |spoil: bool| {
        fs::remove_dir_all(&out).expect("removed");
        let child =
            super::run_child("tests::convert::dies_before_publishing", &format!("{}", dir.path().display()));
        assert!(!child.status.success() && hidden.join(".done").exists(), "{child:?}");
        if spoil {
            let tag = hidden.join("global_step3");
            let file = tag.join("zero_pp_rank_1_mp_rank_00_optim_states.pt");
            let mut bytes = fs::read(&file).expect("there");
            let middle = bytes.len() / 2;
            bytes[middle] ^= 1;
            fs::write(&file, bytes).expect("written");
        }
        let report = convert(&*source, &out, &task, |_, _| {}).expect("goes on");
        assert!(!hidden.exists());
        for ((_, a), (path, b)) in files(&whole).into_iter().zip(files(&out)) {
            assert!(a == b, "{}", path.display());
        }
        report.reused
    };
    assert_eq!(kill(false), 6, "three ranks' two files");
    assert_eq!(kill(true), 5, "the spoilt one is written again");
    // another task uses nothing of it
    let child =
        super::run_child("tests::convert::dies_before_publishing", &format!("{}", dir.path().display()));
    assert!(!child.status.success() && !out.exists());
    let other = convert(&*source, &out, &options(Target::DeepSpeed, 2, 3), |_, _| {}).expect("converted");
    assert_eq!(other.reused, 0);
}

/// A child of the test above: it is killed at the last step before the folder gets its name.
#[test]
fn dies_before_publishing() {
    let Some(dir) = super::child_argument() else { return };
    let source = open(&golden("z2_padded"));
    let out = Path::new(&dir).join("out");
    let _ = fs::remove_dir_all(&out);
    let record = Path::new(&dir).join(".out.converting/.done");
    convert(&*source, &out, &options(Target::DeepSpeed, 3, 3), |_, _| {
        let recorded = fs::read_to_string(&record).unwrap_or_default();
        // three ranks' two files, and `latest`
        if recorded.lines().filter(|l| !l.is_empty()).count() >= 7 {
            let _ = nix::sys::signal::kill(nix::unistd::Pid::this(), nix::sys::signal::Signal::SIGKILL);
        }
    })
    .expect("converted");
}

#[test]
fn a_folder_of_other_things_is_not_replaced() {
    let dir = fast_dir();
    let source = open(&golden("z1_tied"));
    let out = dir.path().join("out");
    let task = options(Target::Universal, 2, 1);
    let force = ConvertOptions { force: true, ..task.clone() };
    convert(&*source, &out, &task, |_, _| {}).expect("converted");
    assert!(matches!(convert(&*source, &out, &task, |_, _| {}), Err(CkptError::Refused { .. })));
    convert(&*source, &out, &force, |_, _| {}).expect("replaced");
    fs::write(out.join("mine"), "mine").expect("written");
    let refused = convert(&*source, &out, &force, |_, _| {}).expect_err("refused").to_string();
    assert!(refused.contains("mine"), "{refused}");
    assert_eq!(names(dir.path()), ["out"], "nothing is left beside");
}

#[test]
fn a_damaged_source_gives_an_error_and_leaves_nothing() {
    let dir = fast_dir();
    let from = dir.path().join("from");
    super::copy_tree(&golden("z2_padded"), &from);
    let file = from.join("global_step3/zero_pp_rank_2_mp_rank_00_optim_states.pt");
    let mut bytes = fs::read(&file).expect("there");
    let middle = bytes.len() / 2;
    bytes[middle] ^= 4;
    fs::write(&file, bytes).expect("written");
    let why = convert(&*open(&from), &dir.path().join("out"), &options(Target::DeepSpeed, 3, 2), |_, _| {});
    assert!(matches!(why, Err(CkptError::Damaged { .. })), "{why:?}");
    assert_eq!(names(dir.path()), ["from"]);
}

/// A folder with the weights of a golden one and nothing else.
fn weights_of(dir: &Path, golden_folder: &str) -> PathBuf {
    let weights = dir.join("weights");
    fs::create_dir(&weights).expect("made");
    fs::copy(golden(golden_folder).join("model.safetensors"), weights.join("model.safetensors"))
        .expect("copied");
    weights
}

#[test]
fn weights_alone_are_no_training_state_of_deepspeed_s() {
    let dir = fast_dir();
    let weights = weights_of(dir.path(), "hf_ddp/checkpoint-3");
    for to in [Target::DeepSpeed, Target::Universal] {
        let out = dir.path().join("out");
        let why =
            convert(&*open(&weights), &out, &options(to, 2, 1), |_, _| {}).expect_err("refused").to_string();
        assert!(why.contains("--to safetensors") && why.contains("--to native"), "{why}");
        assert!(!out.exists());
    }
}

/// Ours says that they are weights alone, and another cut of it says so too.
#[test]
fn weights_alone_become_a_checkpoint_of_ours_that_says_so() {
    let dir = fast_dir();
    let weights = weights_of(dir.path(), "hf_ddp/checkpoint-3");
    let (out, again) = (dir.path().join("out"), dir.path().join("again"));
    let made = convert(&*open(&weights), &out, &options(Target::Native, 2, 3), |_, _| {}).expect("converted");
    assert!(made.step == 0 && made.notices.iter().any(|n| n.contains("weights alone")), "{made:?}");
    let cut = convert(&*open(&out), &again, &options(Target::Native, 2, 1), |_, _| {}).expect("converted");
    assert!(cut.notices.iter().any(|n| n.contains("weights alone")), "{cut:?}");
    let original = open(&weights);
    for path in [&out, &again] {
        assert!(crate::verify(path).expect("a report").is_sound());
        let found = open(path);
        assert!(found.is_weights_alone() && found.state().frozen.is_empty());
        assert_eq!(found.tensors().len(), original.tensors().len());
        for info in original.tensors() {
            let read = |source: &dyn Source| {
                let mut out = vec![0f32; info.elements() as usize];
                let role = Role::Weight;
                let all = Request { name: &info.name, role, start_element: 0, out: &mut out };
                source.read_many(&mut [all]).expect("sound");
                out.into_iter().map(f32::to_bits).collect::<Vec<_>>()
            };
            assert_eq!(read(&*found), read(&*original), "{}", info.name);
        }
    }
    // what belongs to a training state makes it one, and one that lost its optimizer is none to begin from
    fs::copy(golden("hf_ddp").join("checkpoint-3/scheduler.pt"), weights.join("scheduler.pt"))
        .expect("copied");
    fs::copy(golden("hf_ddp").join("checkpoint-3/trainer_state.json"), weights.join("trainer_state.json"))
        .expect("copied");
    assert!(!open(&weights).is_weights_alone());
}

/// A training state whose optimizer can't be told apart isn't quietly one without.
#[test]
fn an_optimizer_that_is_not_read_is_not_left_out() {
    let dir = fast_dir();
    let from = dir.path().join("from");
    super::copy_tree(&golden("hf_ddp").join("checkpoint-3"), &from);
    let path = from.join("model.safetensors");
    let mut text = fs::read(&path).expect("there");
    let at = text.windows(9).position(|w| w == b"q_proj.we").expect("a name");
    text[at] = b'x';
    fs::write(&path, text).expect("written");
    for to in [Target::Native, Target::DeepSpeed, Target::Universal] {
        let out = dir.path().join("out");
        let why =
            convert(&*open(&from), &out, &options(to, 2, 1), |_, _| {}).expect_err("refused").to_string();
        assert!(why.contains("isn't read") && why.contains("--to safetensors") && !out.exists(), "{why}");
    }
}

#[test]
fn impossible_options_are_refused() {
    let dir = fast_dir();
    let source = open(&golden("z1_tied"));
    for wrong in [
        options(Target::DeepSpeed, 0, 1),
        options(Target::DeepSpeed, 4, 1),
        options(Target::DeepSpeed, 2, 0),
        ConvertOptions { memory: 1 << 20, ..options(Target::DeepSpeed, 2, 1) },
        ConvertOptions { sub_group_size: 0, ..options(Target::DeepSpeed, 3, 1) },
        ConvertOptions { dtype: Some(Dtype::I64), ..options(Target::DeepSpeed, 3, 1) },
    ] {
        let result = convert(&*source, &dir.path().join("out"), &wrong, |_, _| {});
        assert!(matches!(result, Err(CkptError::Invalid { .. })), "{wrong:?}");
    }
}

/// A checkpoint of any size that takes no memory.
struct Endless(TensorInfo, PathBuf);

impl Source for Endless {
    fn state(&self) -> TrainingState {
        TrainingState::default()
    }
    fn path(&self) -> &Path {
        &self.1
    }
    fn tensors(&self) -> Vec<TensorInfo> {
        let of = |role| TensorInfo { role, ..self.0.clone() };
        [Role::Weight, Role::ExpAvg, Role::ExpAvgSq].map(of).to_vec()
    }
    fn read_many(&self, requests: &mut [Request<'_>]) -> Result<()> {
        requests.iter_mut().for_each(|r| r.out.fill(1.5));
        Ok(())
    }
    fn step(&self) -> Option<u64> {
        Some(1)
    }
}

/// 1.1 GB within 64 MB and what the process itself needs.
#[test]
fn memory_stays_within_its_bound_whatever_the_size() {
    if super::child_argument().is_none() {
        let name = "tests::convert::memory_stays_within_its_bound_whatever_the_size";
        let child = super::run_child(name, "child");
        assert!(child.status.success(), "{child:?}");
        return;
    }
    let dir = tempfile::tempdir().expect("a directory");
    let (name, role, dtype) = ("w".to_owned(), Role::Weight, Dtype::F32);
    let source =
        Endless(TensorInfo { name, role, dtype, shape: vec![80, 1 << 20] }, dir.path().join("source"));
    fs::create_dir(&source.1).expect("made");
    let task = ConvertOptions { memory: 64 << 20, ..options(Target::DeepSpeed, 2, 1) };
    let report = convert(&source, &dir.path().join("out"), &task, |_, _| {}).expect("converted");
    assert!(report.bytes > 1 << 30);
    let status = fs::read_to_string("/proc/self/status").expect("Linux");
    let peak = status.lines().find_map(|l| l.strip_prefix("VmHWM:")).expect("a line").trim();
    let peak: u64 = peak.trim_end_matches(" kB").parse().expect("a number");
    assert!(peak < 96 << 10, "{peak} kB");
}
