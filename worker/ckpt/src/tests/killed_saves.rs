//! SIGKILL at every fault point of a save or gather always leaves a complete checkpoint.
use super::*;
use crate::checkpoint::Checkpoint;
use crate::{GatherOptions, fault, gather, latest, list, prune, verify};
use std::os::unix::process::ExitStatusExt;

const WEIGHTS: &[(&str, &[u64])] = &[("model.a", &[3, 5]), ("model.b", &[7])];

fn old_facts() -> RunFacts {
    facts(10, 2, WEIGHTS)
}

/// The facts that the scenario saves.
fn new_facts(scenario: &str) -> RunFacts {
    match scenario {
        "next" => facts(20, 2, WEIGHTS),
        "first" => old_facts(),
        _ => RunFacts { run_seed: 8, ..old_facts() },
    }
}

/// Runs in the child process that is killed.
fn run_scenario(scenario: &str, root: &Path) -> Result<()> {
    if scenario == "gather" {
        let source = Checkpoint::open(&root.join("step-00000010"))?;
        let options = GatherOptions { force: true, max_shard_size: 40, ..GatherOptions::default() };
        return gather(&source, &root.join("hf"), &options, |_, _| ()).map(drop);
    }
    let swap = if scenario == "two_steps" { Swap::TwoSteps } else { Swap::Atomic };
    save_with(root, &new_facts(scenario), swap)?;
    prune(root, 1).map(drop)
}

/// Child process of the tests below, with the argument `scenario:n:directory`.
#[test]
fn child() {
    let Some(argument) = child_argument() else { return };
    let (scenario, rest) = argument.split_once(':').expect("scenario");
    let (n, dir) = rest.split_once(':').expect("n");
    let dir = Path::new(dir);
    fault::arm(n.parse().expect("a number"));
    run_scenario(scenario, &dir.join("root")).expect("the save works");
    std::fs::write(dir.join("points"), fault::names().join("\n")).expect("written");
}

/// Kills the scenario at each of its fault points. `check(directory)` checks the remaining files,
/// and returns whether the new state is visible. The old state must be visible at early points, the
/// new one at later ones.
fn kill_everywhere(scenario: &str, prepare: impl Fn(&Path), check: impl Fn(&Path) -> bool) {
    let template = memory_dir();
    prepare(&template.path().join("root"));
    let run = |n: usize| {
        let dir = memory_dir();
        copy_tree(template.path(), dir.path());
        let output =
            run_child("tests::killed_saves::child", &format!("{scenario}:{n}:{}", dir.path().display()));
        (dir, output)
    };
    let (dir, output) = run(0);
    assert!(output.status.success(), "{output:?}");
    assert!(check(&dir.path().join("root")), "without a kill, the new state is visible");
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
        assert!(
            is_new || !seen_new,
            "point {n} ({}): the old state is visible after the new one",
            points[n - 1]
        );
        seen_new |= is_new;
        assert!(n > 1 || !is_new, "the first point is before any change");
    }
    assert!(seen_new);
}

/// Asserts that every listed checkpoint is complete and has the old or the new facts, and that the
/// next save works and removes all files of the interrupted one. Returns whether the new checkpoint
/// is listed.
fn check_root(scenario: &str, root: &Path) -> bool {
    let (old, new) = (old_facts(), new_facts(scenario));
    let listed = list(root).expect("listable");
    let holds = |path: &Path, facts: &RunFacts| {
        let checkpoint = Checkpoint::open(path).expect("complete");
        let is_equal = checkpoint.facts() == facts;
        if is_equal {
            assert_holds(&checkpoint, facts);
        }
        is_equal
    };
    assert!(scenario == "first" || !listed.is_empty(), "there is always a complete checkpoint");
    assert!(listed.iter().all(|(_, path)| holds(path, &old) || holds(path, &new)), "neither old nor new");
    let is_new = listed.first().is_some_and(|(_, path)| holds(path, &new));
    if !listed.is_empty() {
        let report = verify(root).expect("verifiable");
        assert!(report.is_sound(), "{report:?}");
    }
    if let Some(path) = latest(root).expect("`latest` is absent or valid") {
        assert!(Checkpoint::open(&path).is_ok());
    }
    let later = facts(30, 1, WEIGHTS);
    save(root, &later).expect("the next save works");
    prune(root, 1).expect("pruned");
    assert_eq!(entry_names(root), ["latest", "step-00000030"], "no files of the interrupted save remain");
    assert_holds(&Checkpoint::open(&latest(root).expect("sound").expect("there")).expect("complete"), &later);
    is_new
}

fn with_old(root: &Path) {
    save(root, &old_facts()).expect("saved");
}

#[test]
fn a_kill_during_the_first_save() {
    kill_everywhere(
        "first",
        |root| std::fs::create_dir_all(root.parent().expect("a parent")).expect("made"),
        |root| {
            // an early kill leaves no directory
            root.exists() && check_root("first", root)
        },
    );
}

#[test]
fn a_kill_during_a_later_save_and_its_pruning() {
    kill_everywhere("next", with_old, |root| check_root("next", root));
}

#[test]
fn a_kill_while_a_step_is_saved_again() {
    kill_everywhere("again", with_old, |root| check_root("again", root));
}

#[test]
fn a_kill_while_a_step_is_saved_again_without_atomic_exchange() {
    kill_everywhere("two_steps", with_old, |root| check_root("two_steps", root));
}

#[test]
fn a_kill_during_a_gather_that_replaces_an_older_one() {
    let marker = |root: &Path| root.join("hf/model.safetensors").exists();
    let prepare = |root: &Path| {
        with_old(root);
        let source = Checkpoint::open(&root.join("step-00000010")).expect("complete");
        gather(&source, &root.join("hf"), &GatherOptions::default(), |_, _| ()).expect("gathered");
        assert!(marker(root));
    };
    kill_everywhere("gather", prepare, |root| {
        // the old gather has one file, the new one several
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
            entry_names(&root.join("hf")).into_iter().filter(|n| n.starts_with("model")).collect();
        assert_eq!(found, expected);
        run_scenario("gather", root).expect("the next one works");
        assert_eq!(
            entry_names(root),
            ["hf", "latest", "step-00000010"],
            "no files of the interrupted gather remain"
        );
        new
    });
}
