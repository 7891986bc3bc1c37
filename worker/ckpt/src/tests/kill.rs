//! kill -9 at every fault point: what is found afterwards is always complete.
use super::*;
use crate::checkpoint::Checkpoint;
use crate::{GatherOptions, fault, gather, latest, list, prune, verify};
use std::os::unix::process::ExitStatusExt;

const WEIGHTS: &[(&str, &[u64])] = &[("model.a", &[3, 5]), ("model.b", &[7])];

fn old() -> Facts {
    facts(10, 2, WEIGHTS)
}

/// What the scenario saves.
fn new(scenario: &str) -> Facts {
    match scenario {
        "next" => facts(20, 2, WEIGHTS),
        "first" => old(),
        _ => Facts { run_seed: 8, ..old() },
    }
}

/// What runs in the process that is killed.
fn act(scenario: &str, root: &Path) -> Result<()> {
    if scenario == "gather" {
        let source = Checkpoint::open(&root.join("step-00000010"))?;
        let options = GatherOptions { force: true, max_shard_size: 40, ..GatherOptions::default() };
        return gather(&source, &root.join("hf"), &options, |_, _| ()).map(drop);
    }
    let swap = if scenario == "two_steps" { Swap::TwoSteps } else { Swap::Atomic };
    save_with(root, &new(scenario), swap)?;
    prune(root, 1).map(drop)
}

/// Not a test by itself: `scenario:n:directory` from the parent.
#[test]
fn child() {
    let Some(argument) = child_argument() else { return };
    let (scenario, rest) = argument.split_once(':').expect("scenario");
    let (n, dir) = rest.split_once(':').expect("n");
    let dir = Path::new(dir);
    fault::arm(n.parse().expect("a number"));
    act(scenario, &dir.join("root")).expect("the save works");
    std::fs::write(dir.join("points"), fault::names().join("\n")).expect("written");
}

/// Kills the scenario at each of its points; `check(directory)` judges what is left and says whether the new state is
/// there. Both states must have been met, the old one first.
fn kill_everywhere(scenario: &str, prepare: impl Fn(&Path), check: impl Fn(&Path) -> bool) {
    let template = fast_dir();
    prepare(&template.path().join("root"));
    let run = |n: usize| {
        let dir = fast_dir();
        copy_tree(template.path(), dir.path());
        let output = run_child("tests::kill::child", &format!("{scenario}:{n}:{}", dir.path().display()));
        (dir, output)
    };
    let (dir, output) = run(0);
    assert!(output.status.success(), "{output:?}");
    assert!(check(&dir.path().join("root")), "unharmed, the new state is there");
    let points = std::fs::read_to_string(dir.path().join("points")).expect("points");
    let points: Vec<&str> = points.lines().collect();
    for kind in ["mkdir", "create", "write", "fsync file", "fsync directory", "rename"] {
        assert!(points.iter().filter(|p| **p == kind).count() >= 2, "{kind} is not among {points:?}");
    }
    let mut seen_new = false;
    for n in 1..=points.len() {
        let (dir, output) = run(n);
        assert_eq!(output.status.signal(), Some(9), "point {n} of {}: {output:?}", points.len());
        let is_new = check(&dir.path().join("root"));
        assert!(is_new || !seen_new, "point {n} ({}): the new state is gone again", points[n - 1]);
        seen_new |= is_new;
        assert!(n > 1 || !is_new, "at the first point nothing has happened yet");
    }
    assert!(seen_new);
}

/// Everything listed is complete and one of the two; returns whether the new one is there. Then the next save works and
/// nothing of the interrupted one is left.
fn check_root(scenario: &str, root: &Path) -> bool {
    let (old, new) = (old(), new(scenario));
    let listed = list(root).expect("listable");
    let holds = |path: &Path, facts: &Facts| {
        let checkpoint = Checkpoint::open(path).expect("complete");
        let same = checkpoint.facts() == facts;
        if same {
            assert_holds(&checkpoint, facts);
        }
        same
    };
    assert!(scenario == "first" || !listed.is_empty(), "a complete checkpoint is always there");
    assert!(listed.iter().all(|(_, path)| holds(path, &old) || holds(path, &new)), "neither old nor new");
    let is_new = listed.first().is_some_and(|(_, path)| holds(path, &new));
    if !listed.is_empty() {
        let report = verify(root).expect("verifiable");
        assert!(report.is_sound(), "{report:?}");
    }
    if let Some(path) = latest(root).expect("`latest` is absent or right") {
        assert!(Checkpoint::open(&path).is_ok());
    }
    let later = facts(30, 1, WEIGHTS);
    save(root, &later).expect("the next save works");
    prune(root, 1).expect("pruned");
    assert_eq!(names(root), ["latest", "step-00000030"], "nothing is left of the interrupted save");
    assert_holds(&Checkpoint::open(&latest(root).expect("sound").expect("there")).expect("complete"), &later);
    is_new
}

fn with_old(root: &Path) {
    save(root, &old()).expect("saved");
}

#[test]
fn the_first_save() {
    kill_everywhere(
        "first",
        |root| std::fs::create_dir_all(root.parent().expect("a parent")).expect("made"),
        |root| {
            // killed before even the directory was made
            root.exists() && check_root("first", root)
        },
    );
}

#[test]
fn a_later_save_and_the_removal_of_the_older() {
    kill_everywhere("next", with_old, |root| check_root("next", root));
}

#[test]
fn the_same_step_again() {
    kill_everywhere("again", with_old, |root| check_root("again", root));
}

#[test]
fn the_same_step_again_where_folders_cannot_be_swapped() {
    kill_everywhere("two_steps", with_old, |root| check_root("two_steps", root));
}

#[test]
fn gathering_over_older_gathered_weights() {
    let marker = |root: &Path| root.join("hf/model.safetensors").exists();
    let prepare = |root: &Path| {
        with_old(root);
        let source = Checkpoint::open(&root.join("step-00000010")).expect("complete");
        gather(&source, &root.join("hf"), &GatherOptions::default(), |_, _| ()).expect("gathered");
        assert!(marker(root));
    };
    kill_everywhere("gather", prepare, |root| {
        // old: one file; new: one per tensor
        let new = !marker(root);
        let expected: &[&str] = match new {
            true => &[
                "model-00001-of-00002.safetensors",
                "model-00002-of-00002.safetensors",
                "model.safetensors.index.json",
            ],
            false => &["model.safetensors"],
        };
        let found: Vec<String> =
            names(&root.join("hf")).into_iter().filter(|n| n.starts_with("model")).collect();
        assert_eq!(found, expected);
        act("gather", root).expect("the next one works");
        assert_eq!(names(root), ["hf", "latest", "step-00000010"], "nothing is left of the interrupted one");
        new
    });
}
