//! Formats the properties and tensors of a checkpoint as text and JSON for `launch ckpt inspect`.
use crate::format::format_table;
use ckpt::{
    Checkpoint, ExternalCheckpoint, TensorInfo, TensorRole, TensorSource, TiedWeight,
    rng_files::rank_files::{self, RngStateDigest},
};
use diagnostic::quantity::{format_bytes, format_count};
use diagnostic::terminal_text::filter_line;
use serde_json::{Map, Value, json};
use std::collections::HashSet;

/// The largest number of settings that the table of optimizer groups shows. Further settings are
/// left out.
const MAX_SHOWN_SETTINGS: usize = 32;
/// The length, in characters, to which a setting in the table of optimizer groups is truncated.
const MAX_CELL_CHARS: usize = 60;

/// Returns a JSON object that describes a checkpoint in launch's own format: its properties, shards
/// and tensors.
pub(super) fn describe_native_as_json(checkpoint: &Checkpoint) -> Value {
    let facts = checkpoint.run_facts();
    let tensors: Vec<Value> = checkpoint.tensors().map(|t| tensor_to_json(&t)).collect();
    let files: Vec<Value> = checkpoint
        .shard_sizes()
        .enumerate()
        .map(|(i, (name, bytes))| shard_file_to_json(checkpoint, i, name, bytes))
        .collect();
    json!({
        "kind": "native", "path": checkpoint.path(), "step": facts.step, "world": facts.world, "stage": facts.stage,
        "tokens": facts.tokens, "run_seed": facts.run_seed, "program": facts.program, "family": facts.model.family,
        "bytes": checkpoint.total_shard_bytes(), "files": files, "tensors": tensors, "ties": facts.model.ties,
        "frozen": facts.model.frozen, "groups": facts.groups, "cursor": facts.cursor, "rng": facts.rng,
        "tokenizer": facts.tokenizer.iter().map(|t| t.name.as_str()).collect::<Vec<_>>(),
        "config": facts.model.hf_config, "job": facts.job, "missing": list_missing_parts(checkpoint),
    })
}

/// Describes a shard file as a JSON object with name and size. With host-local storage, adds the
/// host that wrote the shard, and whether the shard is stored on this host.
fn shard_file_to_json(checkpoint: &Checkpoint, file: usize, name: &str, bytes: u64) -> Value {
    let mut value = json!({"name": name, "bytes": bytes});
    if let Some(host) = checkpoint.shard_host(file) {
        value["host"] = json!(host);
        value["here"] = json!(checkpoint.local_shard_flags().get(file));
    }
    value
}

/// Returns a text with the name and the host of each shard of a checkpoint that is stored on
/// another host. Returns `None` if all shards are on this host.
fn format_remote_shards(checkpoint: &Checkpoint) -> Option<String> {
    let absent = checkpoint
        .shard_sizes()
        .zip(checkpoint.local_shard_flags())
        .enumerate()
        .filter(|(_, (_, here))| !**here);
    let line = |(i, ((name, _), _)): (usize, ((&str, u64), &bool))| {
        let host = checkpoint.shard_host(i)?.to_string();
        Some(format!("{name} on host {}", filter_line(&host)))
    };
    let lines: Vec<String> = absent.filter_map(line).collect();
    (!lines.is_empty()).then(|| lines.join(", "))
}

/// Lists what a checkpoint lacks for a complete training state, by names such as `optimizer state`
/// or `data cursor`.
fn list_missing_parts(checkpoint: &Checkpoint) -> Vec<&'static str> {
    let facts = checkpoint.run_facts();
    let optimizer = checkpoint.tensors().any(|t| t.role.is_optimizer_state());
    let parts = [
        ("optimizer state", optimizer),
        ("optimizer groups", !facts.groups.is_null()),
        ("data cursor", !facts.cursor.is_null()),
        ("rng facts", !facts.rng.is_null()),
        ("job", !facts.job.is_null()),
        ("tokenizer", !facts.tokenizer.is_empty()),
    ];
    parts.into_iter().filter(|(_, present)| !present).map(|(name, _)| name).collect()
}

/// Returns a text that describes a checkpoint in launch's own format: a list of properties, and
/// tables of the optimizer groups and tensors.
pub(super) fn describe_native_as_text(checkpoint: &Checkpoint) -> String {
    let facts = checkpoint.run_facts();
    let tensors: Vec<TensorInfo> = checkpoint.tensors().collect();
    let bytes = checkpoint.total_shard_bytes();
    let mut lines = vec![
        ("path", checkpoint.path().display().to_string()),
        ("kind", "native".to_owned()),
        ("step", facts.step.to_string()),
        ("world", facts.world.to_string()),
        ("stage", facts.stage.to_string()),
        ("tokens", facts.tokens.to_string()),
        ("family", facts.model.family.clone()),
        ("bytes", format!("{bytes} ({})", format_bytes(bytes))),
        ("program", facts.program.clone()),
    ];
    lines.extend(format_remote_shards(checkpoint).map(|shards| ("elsewhere", shards)));
    lines.extend(format_role_lines(&tensors));
    lines.push(("ties", format_ties(&facts.model.ties)));
    lines.push(("cursor", facts.cursor.to_string()));
    lines.push(("rng", facts.rng.to_string()));
    lines.push((
        "missing",
        replace_empty_with_none_text(list_missing_parts(checkpoint).join(", "), "nothing"),
    ));
    join_properties_and_tables(&lines, &facts.groups, &tensors)
}

/// Returns a text that describes a checkpoint written by another program: properties, and tables of
/// optimizer groups, tensors and RNG streams (random generators).
pub(super) fn describe_external_as_text(checkpoint: &ExternalCheckpoint) -> String {
    let facts = checkpoint.facts();
    let tensors = checkpoint.tensors();
    let bytes = sum_sizes(checkpoint.files().map(|(_, bytes)| bytes));
    let files = format_count(checkpoint.files().count(), "file");
    let mut lines = vec![
        ("path", checkpoint.path().display().to_string()),
        ("kind", facts.kind.to_owned()),
        ("writer", facts.writer.clone()),
        ("tag", facts.tag.clone()),
        ("step", facts.state.step.map_or("unknown".into(), |s| s.to_string())),
        ("world", facts.state.world.map_or("unknown".into(), |w| w.to_string())),
        ("stage", facts.state.stage.map_or("-".into(), |s| s.to_string())),
        ("bytes", format!("{bytes} ({}) in {files}", format_bytes(bytes))),
    ];
    lines.extend(format_role_lines(&tensors));
    lines.push(("ties", format_ties(&facts.state.ties)));
    lines.push(("frozen", replace_empty_with_none_text(facts.state.frozen.join(", "), "none")));
    lines.push(("scheduler", facts.state.scheduler.to_string()));
    if !facts.state.loss_scaler.is_null() {
        lines.push(("scaler", facts.state.loss_scaler.to_string()));
    }
    lines.push(("updates", format_update_counts(facts.state.steps.values())));
    lines.push(("rng files", replace_empty_with_none_text(facts.rng_files.join(", "), "none")));
    let missing: Vec<String> = facts.missing.iter().map(ToString::to_string).collect();
    lines.push(("missing", replace_empty_with_none_text(missing.join(", "), "nothing")));
    if !facts.lost.is_empty() {
        lines.push(("lost", facts.lost.join(", ")));
    }
    join_properties_and_tables(&lines, &json!(facts.state.groups), &tensors)
        + &format_rng_stream_table(checkpoint)
}

/// Formats how many optimizer updates the weights of a checkpoint have received, as one number or
/// as a range if the weights differ. Returns `unknown` if there are no counts.
fn format_update_counts<'a>(steps: impl Iterator<Item = &'a u64>) -> String {
    let distinct: std::collections::BTreeSet<u64> = steps.copied().collect();
    match (distinct.first(), distinct.last()) {
        (Some(a), Some(b)) if a == b => a.to_string(),
        (Some(a), Some(b)) => format!("{a} to {b}, by weight"),
        _ => "unknown".into(),
    }
}

/// Formats a table with a digest of each rank's random generator states in a checkpoint, or an
/// error text if the state files are unreadable. The result is empty if the checkpoint has no RNG
/// files.
///
/// Two streams whose digests in the table are equal produce equal random numbers.
fn format_rng_stream_table(checkpoint: &ExternalCheckpoint) -> String {
    let rows = match read_rng_streams(checkpoint) {
        Ok(rows) if rows.is_empty() => return String::new(),
        Ok(rows) => rows,
        Err(error) => {
            return format!("\nRNG states: {}\n", filter_line(&error.to_string()));
        }
    };
    let mut table = vec![["RANK", "STREAM", "DIGEST", "FILE"].map(str::to_owned).to_vec()];
    table.extend(rows.iter().map(|s| {
        vec![
            s.rank.to_string(),
            s.kind.to_string(),
            s.digest.chars().take(16).collect(),
            filter_line(&s.file),
        ]
    }));
    format!("\n{}", format_table(&table))
}

/// Computes a digest of each RNG state that is stored with a checkpoint, in the directory of the
/// checkpoint or otherwise in the parent directory.
fn read_rng_streams(checkpoint: &ExternalCheckpoint) -> diagnostic::Result<Vec<RngStateDigest>> {
    if checkpoint.facts().rng_files.is_empty() {
        return Ok(Vec::new());
    }
    let path = checkpoint.path();
    let parent = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(path);
    let digests = rank_files::compute_rng_state_digests(path)?;
    if digests.is_empty() { Ok(rank_files::compute_rng_state_digests(parent)?) } else { Ok(digests) }
}

/// Returns a JSON object that describes a checkpoint written by another program: properties, files,
/// tensors and RNG streams (random generators).
pub(super) fn describe_external_as_json(checkpoint: &ExternalCheckpoint) -> Value {
    let mut value = serde_json::to_value(checkpoint.facts()).unwrap_or(Value::Null);
    let files: Vec<Value> =
        checkpoint.files().map(|(name, bytes)| json!({"name": name, "bytes": bytes})).collect();
    value["path"] = json!(checkpoint.path());
    value["bytes"] = sum_sizes(checkpoint.files().map(|(_, bytes)| bytes)).into();
    value["files"] = files.into();
    value["tensors"] = checkpoint.tensors().iter().map(tensor_to_json).collect();
    value["streams"] = match read_rng_streams(checkpoint) {
        Ok(rows) => json!(rows),
        Err(error) => json!({ "error": error.to_string(), "code": error.code().name() }),
    };
    value["config"] = checkpoint.hf_config().map_or(Value::Null, |c| Value::Object(c.clone()));
    value
}

/// Adds up sizes of files or tensors in bytes. Returns the largest `u64` if the sum is larger,
/// because sparse files may have any size.
fn sum_sizes(sizes: impl Iterator<Item = u64>) -> u64 {
    sizes.fold(0, u64::saturating_add)
}

/// Describes a tensor as a JSON object with name, role, dtype, shape and size in bytes.
fn tensor_to_json(t: &TensorInfo) -> Value {
    json!({"name": t.name, "role": t.role, "dtype": t.dtype, "shape": t.shape, "bytes": t.size_in_bytes()})
}

/// Returns `text` or, if `text` is empty, the text `none`.
fn replace_empty_with_none_text(text: String, none: &str) -> String {
    if text.is_empty() { none.to_owned() } else { text }
}

/// Formats tied weights as pairs `alias = target`, or as `none`.
fn format_ties(ties: &[TiedWeight]) -> String {
    replace_empty_with_none_text(
        ties.iter().map(|t| format!("{} = {}", t.alias, t.target)).collect::<Vec<_>>().join(", "),
        "none",
    )
}

/// Summarizes the tensors of a checkpoint by role, such as weights or optimizer moments, with the
/// number and size of each. Returns the name of each role that occurs, with a text of the number of
/// tensors, the number of elements and the dtypes.
fn format_role_lines(tensors: &[TensorInfo]) -> Vec<(&'static str, String)> {
    let mut lines = Vec::new();
    for role in TensorRole::ALL {
        let of_role: Vec<&TensorInfo> = tensors.iter().filter(|t| t.role == role).collect();
        if !of_role.is_empty() {
            let elements = sum_sizes(of_role.iter().map(|t| t.element_count()));
            let mut dtypes: Vec<String> = of_role.iter().map(|t| t.dtype.to_string()).collect();
            dtypes.sort_unstable();
            dtypes.dedup();
            let (tensors, elements) =
                (format_count(of_role.len(), "tensor"), format_count(elements, "element"));
            lines.push((role.name(), format!("{tensors}, {elements}, {}", dtypes.join(" and "))));
        }
    }
    lines
}

/// Formats the properties in `lines`, one per line, and appends the tables of optimizer groups and
/// tensors.
fn join_properties_and_tables(lines: &[(&str, String)], groups: &Value, tensors: &[TensorInfo]) -> String {
    let mut text: String =
        lines.iter().map(|(key, value)| format!("{key:<10}  {}\n", filter_line(value))).collect();
    for table in [format_group_table(groups), format_tensor_table(tensors)] {
        if !table.is_empty() {
            text.push('\n');
            text.push_str(&table);
        }
    }
    text
}

/// Formats a table with a row for each optimizer group and a column for each setting. The result is
/// empty if there are no groups.
fn format_group_table(groups: &Value) -> String {
    let groups: Vec<&Map<String, Value>> =
        groups.as_array().into_iter().flatten().filter_map(Value::as_object).collect();
    let (mut columns, mut seen): (Vec<&str>, HashSet<&str>) = Default::default();
    for (key, value) in groups.iter().flat_map(|g| g.iter()) {
        // settings that no group uses are left out
        let used = !value.is_null() && value != false;
        if used && seen.insert(key) {
            columns.push(key);
        }
    }
    let first = ["name", "lr", "initial_lr", "weight_decay", "betas", "eps", "momentum"];
    columns.sort_by_key(|c| first.iter().position(|f| f == c).unwrap_or(first.len()));
    columns.truncate(MAX_SHOWN_SETTINGS);
    let cell = |v: Option<&Value>| match v {
        None | Some(Value::Null) => "-".to_owned(),
        Some(Value::String(s)) => format_cell(s),
        Some(Value::Array(items)) if items.len() > 2 => items.len().to_string(),
        Some(other) => format_cell(&other.to_string()),
    };
    let head =
        std::iter::once("GROUP".to_owned()).chain(columns.iter().map(|c| format_cell(&c.to_uppercase())));
    let mut rows: Vec<Vec<String>> = vec![head.collect()];
    rows.extend(groups.iter().enumerate().map(|(i, g)| {
        std::iter::once(i.to_string()).chain(columns.iter().map(|c| cell(g.get(*c)))).collect()
    }));
    if groups.is_empty() { String::new() } else { format_table(&rows) }
}

/// Shortens a text from a checkpoint's file to a table cell of at most [`MAX_CELL_CHARS`]
/// characters and an ellipsis.
fn format_cell(text: &str) -> String {
    let mut cell: String = text.chars().take(MAX_CELL_CHARS).collect();
    if cell.len() < text.len() {
        cell.push('…');
    }
    filter_line(&cell)
}

/// Formats a table with a row for each tensor: role, dtype, shape and name.
fn format_tensor_table(tensors: &[TensorInfo]) -> String {
    let shape = |t: &TensorInfo| t.shape.iter().map(u64::to_string).collect::<Vec<_>>().join(" × ");
    let mut rows = vec![["ROLE", "DTYPE", "SHAPE", "NAME"].map(str::to_owned).to_vec()];
    rows.extend(tensors.iter().map(|t| {
        vec![
            t.role.to_string(),
            t.dtype.to_string(),
            replace_empty_with_none_text(shape(t), "scalar"),
            filter_line(&t.name),
        ]
    }));
    format_table(&rows)
}

#[cfg(test)]
mod tests {
    use super::*;
    use ckpt::Dtype;

    #[test]
    fn tables_are_aligned_and_names_cannot_control_the_terminal() {
        let t = |role, shape: &[u64], name: &str| TensorInfo {
            name: name.into(),
            role,
            dtype: Dtype::F32,
            shape: shape.into(),
        };
        let text = format_tensor_table(&[
            t(TensorRole::Weight, &[16, 8], "a\x1b[2J"),
            t(TensorRole::ExpAvgSq, &[], "b"),
        ]);
        assert_eq!(
            text,
            "ROLE        DTYPE  SHAPE   NAME\nweight      F32    16 × 8  a\u{fffd}[2J\nexp_avg_sq  F32    scalar  b\n"
        );
    }

    /// Replaces the path `dir` in a text by `DIR`, so that the text is equal on every machine.
    fn replace_path(text: &str, dir: &std::path::Path) -> String {
        text.replace(&dir.display().to_string(), "DIR")
    }

    #[test]
    fn the_text_describes_a_native_checkpoint() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = crate::cmd::ckpt::tests::save_sample_checkpoint(dir.path());
        let checkpoint = Checkpoint::open(&path).expect("complete");
        insta::assert_snapshot!("native", replace_path(&describe_native_as_text(&checkpoint), dir.path()));
    }

    #[test]
    fn text_and_json_describe_a_deepspeed_checkpoint() {
        let golden =
            std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../worker/ckpt/tests/golden/z1_tied");
        let ckpt::OpenedCheckpoint::External(checkpoint) = ckpt::open_checkpoint(&golden).expect("complete")
        else {
            panic!("not a checkpoint of DeepSpeed")
        };
        insta::assert_snapshot!(
            "deepspeed",
            replace_path(&describe_external_as_text(&checkpoint), checkpoint.path())
        );
        let value = describe_external_as_json(&checkpoint);
        assert_eq!(
            (&value["kind"], &value["world"], &value["stage"]),
            (&json!("DeepSpeed"), &json!(1), &json!(1))
        );
        assert_eq!(value["tensors"].as_array().map(Vec::len), Some(60));
    }

    #[test]
    fn the_group_table_has_few_and_short_columns() {
        let mut group: Map<String, Value> = (0..1000).map(|i| (format!("key{i}"), json!(i))).collect();
        group.insert("name".into(), json!("x".repeat(100_000)));
        let text = format_group_table(&json!([group]));
        assert!(text.lines().all(|line| line.chars().count() < 1000), "{text}");
        assert_eq!(text.lines().count(), 2);
    }

    #[test]
    fn the_group_table_leaves_out_unused_settings() {
        let groups = json!([
            {"lr": 0.001, "betas": [0.9, 0.98], "amsgrad": false, "foreach": null, "weight_decay": 0.1, "params": ["a", "b", "c"]},
            {"lr": 0.001, "betas": [0.9, 0.98], "amsgrad": false, "foreach": null, "weight_decay": 0.0, "params": []},
        ]);
        let text = format_group_table(&groups);
        insta::assert_snapshot!("groups", text);
        assert_eq!(format_group_table(&Value::Null), "");
    }
}
