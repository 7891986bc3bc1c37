//! Tests the recipe for W&B in docs/observability.md with the real package, if `scripts/setup-tests
//! --wandb` has installed it.
use crate::support::{JobDirectory, environment::isolated_command, find_optional_python, output_to_text};
use std::{fs, path::Path};

/// Returns the script of the recipe, the block of Python code in the documentation.
fn read_recipe() -> String {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/observability.md");
    let page = fs::read_to_string(page).unwrap();
    let (_, script) = page.split_once("```python\n# to_wandb.py").expect("the script");
    format!("# to_wandb.py{}", script.split_once("```").expect("the end of the script").0)
}

#[test]
fn the_recipe_for_wandb_writes_the_curves_without_a_network() {
    let test = "the_recipe_for_wandb_writes_the_curves_without_a_network";
    let Some(python) = find_optional_python(test, "wandb", "W&B (230 MB)") else { return };
    let job = JobDirectory::new();
    fs::write(job.path("to_wandb.py"), read_recipe()).unwrap();
    let ran = job.run(&[]).expect_success();
    let run_dir = job.path(ran.events_named("start")[0]["run_dir"].as_str().unwrap());
    let mut recipe = isolated_command(&python, &job.path(""));
    let output = recipe.arg("to_wandb.py").arg(&run_dir).arg("my-project").output().unwrap();
    assert!(output.status.success(), "{}", output_to_text(&output));
    let directories = fs::read_dir(run_dir.join("wandb")).unwrap().flatten().map(|entry| entry.path());
    let offline: Vec<_> = directories
        .filter(|path| path.file_name().unwrap().to_string_lossy().starts_with("offline-run-"))
        .collect();
    assert_eq!(offline.len(), 1, "{offline:?}");
    let mut files = fs::read_dir(&offline[0]).unwrap().flatten().map(|entry| entry.path());
    let file = files.find(|path| path.extension().is_some_and(|e| e == "wandb")).unwrap();
    let content = fs::read(file).unwrap();
    // Each step is a record with the names of its metrics. A block boundary may split a few names.
    let count = content.windows(10).filter(|part| part == b"train/loss").count();
    let steps = ran.collect_losses().len();
    assert!(count + 2 >= steps, "{count} of {steps} steps");
}
