//! Tests that SIGKILL at any fault point of a save or gather leaves a complete checkpoint.
use super::*;
use crate::layout::native::Checkpoint;
use crate::{
    GatherOptions, fault_points, find_latest_checkpoint, gather_weights, list_checkpoints, prune_checkpoints,
    verify_checkpoints,
};
use std::os::unix::process::ExitStatusExt;

const WEIGHTS: &[(&str, &[u64])] = &[("model.a", &[3, 5]), ("model.b", &[7])];

fn make_old_facts() -> RunFacts {
    make_facts(10, 2, WEIGHTS)
}

/// Makes the description of the checkpoint that the scenario `scenario` saves. The scenario is
/// `first`, `next`, or another name for saving the step of the old checkpoint again.
fn make_new_facts(scenario: &str) -> RunFacts {
    match scenario {
        "next" => make_facts(20, 2, WEIGHTS),
        "first" => make_old_facts(),
        _ => RunFacts { run_seed: 8, ..make_old_facts() },
    }
}

/// Performs the save or gather that `scenario` names, in the checkpoint directory `root`. Called in
/// the child process that is killed.
fn run_scenario(scenario: &str, root: &Path) -> Result<()> {
    if scenario == "gather" {
        let source = Checkpoint::open(&root.join("step-00000010"))?;
        let options = GatherOptions { force: true, max_shard_size: 40, ..GatherOptions::default() };
        return gather_weights(&source, &root.join("hf"), &options, |_, _| ()).map(drop);
    }
    let swap =
        if scenario == "two_steps" { ReplaceMethod::TwoRenames } else { ReplaceMethod::AtomicExchange };
    save_checkpoint_replacing(root, &make_new_facts(scenario), swap)?;
    prune_checkpoints(root, 1).map(drop)
}

/// The child process of [`kill_at_every_point`], with the argument `scenario:n:directory`. Runs the
/// scenario, and is killed at the fault point `n`. If `n` is 0, writes the names of all points to
/// the file `points`. Does nothing outside of a child process.
#[test]
fn child_process_of_a_killed_save() {
    let Some(argument) = read_child_argument() else { return };
    let (scenario, rest) = argument.split_once(':').expect("scenario");
    let (n, dir) = rest.split_once(':').expect("n");
    let dir = Path::new(dir);
    fault_points::arm_fault_points(n.parse().expect("a number"));
    run_scenario(scenario, &dir.join("root")).expect("the save works");
    std::fs::write(dir.join("points"), fault_points::list_passed_points().join("\n")).expect("written");
}

/// Runs the scenario `scenario` once for each fault point, in a child process that is killed at
/// this point, and checks the remaining files. Each run uses a new copy of the directory that
/// `prepare` fills. `check(root)` checks the remaining files, and returns whether the new state is
/// visible. Once the new state is visible, it must be visible for every later point.
fn kill_at_every_point(scenario: &str, prepare: impl Fn(&Path), check: impl Fn(&Path) -> bool) {
    let template = make_memory_dir();
    prepare(&template.path().join("root"));
    let run = |n: usize| {
        let dir = make_memory_dir();
        copy_tree(template.path(), dir.path());
        let output = run_child_test(
            "tests::killed_saves::child_process_of_a_killed_save",
            &format!("{scenario}:{n}:{}", dir.path().display()),
        );
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

/// Returns whether the newest checkpoint in the directory `root` is the one that the interrupted
/// save wrote. Asserts that every listed checkpoint is complete and has the old or the new facts.
/// Also asserts that the next save works and removes all files of the interrupted save.
fn is_new_state_visible(scenario: &str, root: &Path) -> bool {
    let (old, new) = (make_old_facts(), make_new_facts(scenario));
    let listed = list_checkpoints(root).expect("listable");
    let holds = |path: &Path, facts: &RunFacts| {
        let checkpoint = Checkpoint::open(path).expect("complete");
        let is_equal = checkpoint.run_facts() == facts;
        if is_equal {
            assert_contains_saved(&checkpoint, facts);
        }
        is_equal
    };
    assert!(scenario == "first" || !listed.is_empty(), "there is always a complete checkpoint");
    assert!(listed.iter().all(|(_, path)| holds(path, &old) || holds(path, &new)), "neither old nor new");
    let is_new = listed.first().is_some_and(|(_, path)| holds(path, &new));
    if !listed.is_empty() {
        let report = verify_checkpoints(root).expect("verifiable");
        assert!(report.is_sound(), "{report:?}");
    }
    if let Some(path) = find_latest_checkpoint(root).expect("`latest` is absent or valid") {
        assert!(Checkpoint::open(&path).is_ok());
    }
    let later = make_facts(30, 1, WEIGHTS);
    save_checkpoint(root, &later).expect("the next save works");
    prune_checkpoints(root, 1).expect("pruned");
    assert_eq!(
        list_entry_names(root),
        ["latest", "step-00000030"],
        "no files of the interrupted save remain"
    );
    assert_contains_saved(
        &Checkpoint::open(&find_latest_checkpoint(root).expect("sound").expect("there")).expect("complete"),
        &later,
    );
    is_new
}

fn save_old_checkpoint(root: &Path) {
    save_checkpoint(root, &make_old_facts()).expect("saved");
}

#[test]
fn a_kill_during_the_first_save_leaves_no_partial_checkpoint() {
    kill_at_every_point(
        "first",
        |root| std::fs::create_dir_all(root.parent().expect("a parent")).expect("made"),
        |root| {
            // an early kill leaves no directory
            root.exists() && is_new_state_visible("first", root)
        },
    );
}

#[test]
fn a_kill_during_a_later_save_or_its_pruning_leaves_a_valid_checkpoint() {
    kill_at_every_point("next", save_old_checkpoint, |root| is_new_state_visible("next", root));
}

#[test]
fn a_kill_while_a_step_is_saved_again_leaves_a_valid_checkpoint() {
    kill_at_every_point("again", save_old_checkpoint, |root| is_new_state_visible("again", root));
}

#[test]
fn a_kill_between_two_renames_leaves_a_valid_checkpoint() {
    kill_at_every_point("two_steps", save_old_checkpoint, |root| is_new_state_visible("two_steps", root));
}

#[test]
fn a_kill_during_a_gather_leaves_the_old_or_the_new_weights() {
    let marker = |root: &Path| root.join("hf/model.safetensors").exists();
    let prepare = |root: &Path| {
        save_old_checkpoint(root);
        let source = Checkpoint::open(&root.join("step-00000010")).expect("complete");
        gather_weights(&source, &root.join("hf"), &GatherOptions::default(), |_, _| ()).expect("gathered");
        assert!(marker(root));
    };
    kill_at_every_point("gather", prepare, |root| {
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
            list_entry_names(&root.join("hf")).into_iter().filter(|n| n.starts_with("model")).collect();
        assert_eq!(found, expected);
        run_scenario("gather", root).expect("the next one works");
        assert_eq!(
            list_entry_names(root),
            ["hf", "latest", "step-00000010"],
            "no files of the interrupted gather remain"
        );
        new
    });
}
