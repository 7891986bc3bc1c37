//! Checks the rules of docs/ARCHITECTURE.md on the sources: the allowed dependencies between
//! crates and between modules, the names that only some modules may use, and the drawn paths.
//!
//! A commit that changes a rule also changes the rule here or in the document, with the reason.
mod crate_modules;
mod dependencies;
mod drawings;
mod fuzz_targets;
mod graph_tests;
mod module_graph;
mod path_resolution;
mod repository;
mod restrictions;
mod test_binaries;

use crate::{
    drawings::{extract_drawing, find_layer_violations, parse_crate_arrows, parse_layers, parse_path_tree},
    repository::{
        MODULE_GRAPHS, PRODUCT_DIRECTORIES, collect_paths, is_file_or_directory, list_packages,
        path_from_root, read_architecture_document, read_field, read_product_sources, read_text,
        repository_root,
    },
};
use std::{collections::BTreeSet, fs, path::Path};

// --- crates --------------------------------------------------------------------------------------

/// Dependencies (from, to) that are allowed only as dev-dependencies.
const ALLOWED_TEST_DEPENDENCIES: &[(&str, &str)] = &[
    ("launch", "jobspec"),  // end-to-end tests edit jobs
    ("launch", "protocol"), // end-to-end tests read events
];

#[test]
fn crates_depend_only_along_the_drawn_arrows() {
    let packages = list_packages();
    let ours: BTreeSet<String> = packages.iter().map(|p| read_field(p, "name").to_owned()).collect();
    let document = read_architecture_document();
    let arrows = parse_crate_arrows(&extract_drawing(&document, "## Crates"), &ours)
        .unwrap_or_else(|e| panic!("docs/ARCHITECTURE.md, section Crates: {e}"));

    let mut wrong = Vec::new();
    let mut used = BTreeSet::new();
    for package in &packages {
        let from = read_field(package, "name");
        for dependency in package["dependencies"].as_array().expect("dependencies") {
            let to = read_field(dependency, "name");
            if !ours.contains(to) || arrows.contains(&(from.to_owned(), to.to_owned())) {
                continue;
            }
            let is_test_only = dependency["kind"] == "dev";
            if is_test_only && ALLOWED_TEST_DEPENDENCIES.contains(&(from, to)) {
                used.insert((from, to));
            } else {
                wrong.push(format!("{from} -> {to}{}", if is_test_only { " (dev)" } else { "" }));
            }
        }
    }
    assert!(wrong.is_empty(), "edges that docs/ARCHITECTURE.md does not draw: {wrong:?}");
    assert_eq!(used.len(), ALLOWED_TEST_DEPENDENCIES.len(), "only {used:?} of the exceptions are needed");
}

/// Checks that no crate declares the version of a third-party crate. Versions are declared only in
/// the workspace's manifest.
#[test]
fn only_the_workspace_manifest_declares_dependency_versions() {
    let mut declared = Vec::new();
    for package in list_packages() {
        let manifest = Path::new(read_field(&package, "manifest_path")).to_owned();
        let mut in_dependencies = false;
        for line in read_text(&manifest).lines().map(str::trim) {
            if line.starts_with('[') {
                in_dependencies = line.contains("dependencies") && line != "[workspace.dependencies]";
            } else if in_dependencies
                && line.contains('=')
                && !line.starts_with('#')
                && !line.contains("workspace")
            {
                declared.push(format!("{}: {line}", path_from_root(&manifest)));
            }
        }
    }
    assert!(declared.is_empty(), "versions belong in [workspace.dependencies] of the root: {declared:#?}");
}

// --- modules -------------------------------------------------------------------------------------

/// Checks that no files of a crate use each other in a cycle. For each cycle the message shows
/// edges without which the files form no cycle.
#[test]
fn module_cycles_do_not_exist() {
    let mut cycles = Vec::new();
    for (name, graph) in MODULE_GRAPHS.iter() {
        cycles
            .extend(graph.find_cycles().iter().map(|cycle| format!("{name}: {}", graph.format_cycle(cycle))));
    }
    assert!(cycles.is_empty(), "{} cycles between modules:\n{}", cycles.len(), cycles.join("\n"));
}

/// Checks that modules use only modules of lower layers, for each crate in the section Layers of
/// docs/ARCHITECTURE.md.
#[test]
fn modules_use_only_modules_of_lower_layers() {
    let document = read_architecture_document();
    let crates = parse_layers(&extract_drawing(&document, "## Layers"))
        .unwrap_or_else(|e| panic!("docs/ARCHITECTURE.md, section Layers: {e}"));
    let mut wrong = Vec::new();
    for layers in &crates {
        match MODULE_GRAPHS.get(&layers.crate_name) {
            Some(graph) => wrong.extend(find_layer_violations(layers, graph)),
            None => wrong.push(format!("{}: no such crate", layers.crate_name)),
        }
    }
    assert!(wrong.is_empty(), "docs/ARCHITECTURE.md draws other layers:\n{}", wrong.join("\n"));
}

/// Checks that the module graphs are complete: every path leads to an item.
#[test]
fn every_path_of_the_sources_is_resolved() {
    let unresolved: Vec<_> = MODULE_GRAPHS.values().flat_map(|graph| &graph.unresolved_paths).collect();
    assert!(unresolved.is_empty(), "paths that lead to no item: {unresolved:#?}");
    assert!(MODULE_GRAPHS.len() > 5, "only {:?} have a library", MODULE_GRAPHS.keys());
}

// --- the map -------------------------------------------------------------------------------------

#[test]
fn the_drawn_paths_exist_and_every_directory_is_drawn() {
    let document = read_architecture_document();
    let drawn = parse_path_tree(&extract_drawing(&document, "## Modules"))
        .unwrap_or_else(|e| panic!("docs/ARCHITECTURE.md, section Modules: {e}"));
    let absent: Vec<_> = drawn.iter().filter(|path| !is_file_or_directory(path)).collect();
    assert!(absent.is_empty(), "docs/ARCHITECTURE.md draws paths that do not exist: {absent:?}");
    let mut directories = BTreeSet::new();
    for (path, _) in read_product_sources() {
        directories
            .insert(format!("{}/", Path::new(&path).parent().expect("a file has a directory").display()));
    }
    let missing: Vec<_> = directories.iter().filter(|path| !drawn.contains(path)).collect();
    assert!(missing.is_empty(), "docs/ARCHITECTURE.md does not draw {missing:?}");
}

/// Checks that each path in backticks in docs/ARCHITECTURE.md is the path, or the last part of the
/// path, of an existing file or directory.
#[test]
fn shortened_paths_in_the_architecture_document_exist() {
    let mut paths = Vec::new();
    for top in PRODUCT_DIRECTORIES.iter().chain(&["docs/", "tests/", "configs/", "scripts/"]) {
        collect_paths(top, &mut paths);
    }
    let document = read_architecture_document();
    let fences_removed: Vec<&str> = document.split("```").step_by(2).collect();
    let text = fences_removed.concat();
    let is_path = |word: &&str| word.contains('/') || word.ends_with(".rs");
    let words = text.split('`').skip(1).step_by(2).flat_map(str::split_whitespace);
    let is_known = |word: &str| paths.iter().any(|path| path == word || path.ends_with(&format!("/{word}")));
    let absent: BTreeSet<_> = words.filter(is_path).filter(|word| !is_known(word)).collect();
    assert!(absent.is_empty(), "docs/ARCHITECTURE.md names paths that do not exist: {absent:?}");
}

#[test]
fn paths_in_the_docs_exist() {
    let mut dead = Vec::new();
    let mut documents: Vec<_> = ["README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md"]
        .map(|name| repository_root().join(name))
        .into();
    for directory in ["docs", "docs/design", "docs/benchmarks"] {
        for entry in fs::read_dir(repository_root().join(directory)).expect("a directory of documents") {
            documents.push(entry.expect("an entry").path());
        }
    }
    for document in documents.iter().filter(|d| d.extension().is_some_and(|e| e == "md")) {
        let directory = document.parent().expect("a file has a directory");
        for (number, line) in read_text(document).lines().enumerate() {
            let dead_here = find_dead_paths(line, directory).into_iter();
            dead.extend(dead_here.map(|path| format!("{}:{}: {path}", path_from_root(document), number + 1)));
        }
    }
    assert!(dead.is_empty(), "paths that don't exist:\n{}", dead.join("\n"));
}

/// Returns the paths in a line of Markdown that do not exist: relative links, and words in
/// backticks that start with a directory of the repository.
fn find_dead_paths(line: &str, directory: &Path) -> Vec<String> {
    let mut dead = Vec::new();
    for link in line.split("](").skip(1).filter_map(|rest| rest.split(')').next()) {
        let path = link.split('#').next().unwrap_or("");
        if !path.is_empty() && !link.contains("://") && !directory.join(path).exists() {
            dead.push(link.to_owned());
        }
    }
    // every second part of a line that is split at backticks is code
    for word in line.split('`').skip(1).step_by(2).flat_map(str::split_whitespace) {
        let prefixes = [
            "debuglog/",
            "diagnostic/",
            "fuzz/",
            "launcher/",
            "worker/",
            "docs/",
            "scripts/",
            "tests/",
            "configs/",
        ];
        let plain = word.chars().all(|c| c.is_alphanumeric() || "/._-".contains(c));
        if plain
            && prefixes.iter().any(|prefix| word.starts_with(prefix))
            && !repository_root().join(word).exists()
        {
            dead.push(word.to_owned());
        }
    }
    dead
}

#[test]
fn dead_paths_are_found() {
    let line = "see `docs/none.md`, `docs/testing.md`, [a](docs/none.md#b), [b](docs/testing.md#skips), [c](https://x.y/docs/z)";
    assert_eq!(find_dead_paths(line, repository_root()), ["docs/none.md#b", "docs/none.md"]);
}
