//! What `launch ckpt inspect` shows.
use ckpt::{
    Checkpoint, Foreign, Role, Source, TensorInfo, Tie,
    rng_files::folder::{self, StreamDigest},
};
use serde_json::{Map, Value, json};

/// All that is known about a checkpoint of ours.
pub(super) fn native_json(checkpoint: &Checkpoint) -> Value {
    let facts = checkpoint.facts();
    let tensors: Vec<Value> = checkpoint.tensors().map(|t| tensor_json(&t)).collect();
    let files: Vec<Value> = checkpoint
        .files()
        .enumerate()
        .map(|(i, (name, bytes))| file_json(checkpoint, i, name, bytes))
        .collect();
    json!({
        "kind": "native", "path": checkpoint.path(), "step": facts.step, "world": facts.world, "stage": facts.stage,
        "tokens": facts.tokens, "run_seed": facts.run_seed, "program": facts.program, "family": facts.model.family,
        "bytes": checkpoint.bytes(), "files": files, "tensors": tensors, "ties": facts.model.ties,
        "frozen": facts.model.frozen, "groups": facts.groups, "cursor": facts.cursor, "rng": facts.rng,
        "tokenizer": facts.tokenizer.iter().map(|t| t.name.as_str()).collect::<Vec<_>>(),
        "config": facts.model.hf_config, "job": facts.job, "missing": missing(checkpoint),
    })
}

/// A shard; of a checkpoint that is scattered over hosts, also where it was written and whether it is here.
fn file_json(checkpoint: &Checkpoint, file: usize, name: &str, bytes: u64) -> Value {
    let mut value = json!({"name": name, "bytes": bytes});
    if let Some(host) = checkpoint.host_of(file) {
        value["host"] = json!(host);
        value["here"] = json!(checkpoint.here().get(file));
    }
    value
}

/// The shards that lie on other hosts, with the host.
fn elsewhere(checkpoint: &Checkpoint) -> Option<String> {
    let absent = checkpoint.files().zip(checkpoint.here()).enumerate().filter(|(_, (_, here))| !**here);
    let lines: Vec<String> = absent
        .filter_map(|(i, ((name, _), _))| {
            Some(format!("{name} on host {}", clean(&checkpoint.host_of(i)?.to_string())))
        })
        .collect();
    (!lines.is_empty()).then(|| lines.join(", "))
}

/// What a full training state has and this checkpoint has not.
fn missing(checkpoint: &Checkpoint) -> Vec<&'static str> {
    let facts = checkpoint.facts();
    let optimizer = checkpoint.tensors().any(|t| t.role.is_optimizer_state());
    let parts = [
        ("optimizer state", optimizer),
        ("optimizer groups", !facts.groups.is_null()),
        ("data cursor", !facts.cursor.is_null()),
        ("rng facts", !facts.rng.is_null()),
        ("job", !facts.job.is_null()),
        ("tokenizer", !facts.tokenizer.is_empty()),
    ];
    parts.into_iter().filter(|(_, there)| !there).map(|(name, _)| name).collect()
}

/// Facts, then a table of the tensors.
pub(super) fn native(checkpoint: &Checkpoint) -> String {
    let facts = checkpoint.facts();
    let tensors: Vec<TensorInfo> = checkpoint.tensors().collect();
    let mut lines = vec![
        ("path", checkpoint.path().display().to_string()),
        ("kind", "native".to_owned()),
        ("step", facts.step.to_string()),
        ("world", facts.world.to_string()),
        ("stage", facts.stage.to_string()),
        ("tokens", facts.tokens.to_string()),
        ("family", facts.model.family.clone()),
        ("bytes", format!("{} ({})", checkpoint.bytes(), human(checkpoint.bytes()))),
        ("program", facts.program.clone()),
    ];
    lines.extend(elsewhere(checkpoint).map(|said| ("elsewhere", said)));
    lines.extend(roles(&tensors));
    lines.push(("ties", ties(&facts.model.ties)));
    lines.push(("cursor", facts.cursor.to_string()));
    lines.push(("rng", facts.rng.to_string()));
    lines.push(("missing", or(missing(checkpoint).join(", "), "nothing")));
    page(&lines, &facts.groups, &tensors)
}

/// Facts, then tables of the optimizer's groups and of the tensors, of a checkpoint of another program.
pub(super) fn foreign(checkpoint: &Foreign) -> String {
    let facts = checkpoint.facts();
    let tensors = checkpoint.tensors();
    let bytes: u64 = checkpoint.files().map(|(_, bytes)| bytes).sum();
    let mut lines = vec![
        ("path", checkpoint.path().display().to_string()),
        ("kind", facts.kind.to_owned()),
        ("writer", facts.writer.clone()),
        ("tag", facts.tag.clone()),
        ("step", facts.step.map_or("unknown".into(), |s| s.to_string())),
        ("world", facts.world.map_or("unknown".into(), |w| w.to_string())),
        ("stage", facts.stage.map_or("-".into(), |s| s.to_string())),
        ("bytes", format!("{bytes} ({}) in {} files", human(bytes), checkpoint.files().count())),
    ];
    lines.extend(roles(&tensors));
    lines.push(("ties", ties(&facts.ties)));
    lines.push(("frozen", or(facts.frozen.join(", "), "none")));
    lines.push(("scheduler", facts.scheduler.to_string()));
    if !facts.loss_scaler.is_null() {
        lines.push(("scaler", facts.loss_scaler.to_string()));
    }
    lines.push(("updates", updates(facts.steps.values())));
    lines.push(("rng files", or(facts.rng_files.join(", "), "none")));
    lines.push(("missing", or(facts.missing.join(", "), "nothing")));
    if !facts.lost.is_empty() {
        lines.push(("lost", facts.lost.join(", ")));
    }
    page(&lines, &json!(facts.groups), &tensors) + &streams(checkpoint)
}

/// Updates of the optimizer: one number when all weights have the same.
fn updates<'a>(steps: impl Iterator<Item = &'a u64>) -> String {
    let all: std::collections::BTreeSet<u64> = steps.copied().collect();
    match (all.first(), all.last()) {
        (Some(a), Some(b)) if a == b => a.to_string(),
        (Some(a), Some(b)) => format!("{a} to {b}, by weight"),
        _ => "unknown".into(),
    }
}

/// A row per rank and stream of its random states; equal digests go on with the same numbers.
fn streams(checkpoint: &Foreign) -> String {
    let rows = match random_states(checkpoint) {
        Ok(rows) if rows.is_empty() => return String::new(),
        Ok(rows) => rows,
        Err(why) => return format!("\nrandom states: {}\n", clean(&why)),
    };
    let mut table = vec![["RANK", "STREAM", "DIGEST", "FILE"].map(str::to_owned).to_vec()];
    table.extend(rows.iter().map(|s| {
        vec![s.rank.to_string(), s.kind.to_string(), s.digest.chars().take(16).collect(), clean(&s.file)]
    }));
    format!("\n{}", aligned(&table))
}

/// The streams beside a checkpoint: in the folder itself, or, of a tag's folder, in the one around it.
fn random_states(checkpoint: &Foreign) -> Result<Vec<StreamDigest>, String> {
    if checkpoint.facts().rng_files.is_empty() {
        return Ok(Vec::new());
    }
    let path = checkpoint.path();
    let around = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(path);
    match folder::digests(path) {
        Ok(rows) if rows.is_empty() => folder::digests(around).map_err(|e| e.to_string()),
        other => other.map_err(|e| e.to_string()),
    }
}

/// All that is known about a checkpoint of another program.
pub(super) fn foreign_json(checkpoint: &Foreign) -> Value {
    let mut value = serde_json::to_value(checkpoint.facts()).unwrap_or(Value::Null);
    let files: Vec<Value> =
        checkpoint.files().map(|(name, bytes)| json!({"name": name, "bytes": bytes})).collect();
    value["path"] = json!(checkpoint.path());
    value["bytes"] = checkpoint.files().map(|(_, bytes)| bytes).sum::<u64>().into();
    value["files"] = files.into();
    value["tensors"] = checkpoint.tensors().iter().map(tensor_json).collect();
    value["streams"] = match random_states(checkpoint) {
        Ok(rows) => json!(rows),
        Err(why) => json!({ "error": why }),
    };
    value["config"] = checkpoint.hf_config().map_or(Value::Null, |c| Value::Object(c.clone()));
    value
}

fn tensor_json(t: &TensorInfo) -> Value {
    json!({"name": t.name, "role": t.role, "dtype": t.dtype, "shape": t.shape, "bytes": t.bytes()})
}

fn or(text: String, none: &str) -> String {
    if text.is_empty() { none.to_owned() } else { text }
}

fn ties(ties: &[Tie]) -> String {
    or(ties.iter().map(|t| format!("{} = {}", t.alias, t.target)).collect::<Vec<_>>().join(", "), "none")
}

/// A line per role: tensors, elements, dtypes.
fn roles(tensors: &[TensorInfo]) -> Vec<(&'static str, String)> {
    let mut lines = Vec::new();
    for role in Role::ALL {
        let of_role: Vec<&TensorInfo> = tensors.iter().filter(|t| t.role == role).collect();
        if !of_role.is_empty() {
            let elements: u64 = of_role.iter().map(|t| t.elements()).sum();
            let mut dtypes: Vec<String> = of_role.iter().map(|t| t.dtype.to_string()).collect();
            dtypes.sort();
            dtypes.dedup();
            let text = format!("{} tensors, {elements} elements, {}", of_role.len(), dtypes.join(" and "));
            lines.push((role.name(), text));
        }
    }
    lines
}

/// The facts, the groups and the tensors.
fn page(lines: &[(&str, String)], groups: &Value, tensors: &[TensorInfo]) -> String {
    let mut text: String =
        lines.iter().map(|(key, value)| format!("{key:<10}  {}\n", clean(value))).collect();
    for table in [group_table(groups), table(tensors)] {
        if !table.is_empty() {
            text.push('\n');
            text.push_str(&table);
        }
    }
    text
}

/// A row per group of the optimizer; empty when there are none.
fn group_table(groups: &Value) -> String {
    let groups: Vec<&Map<String, Value>> =
        groups.as_array().into_iter().flatten().filter_map(Value::as_object).collect();
    let mut columns: Vec<&str> = Vec::new();
    for key in groups.iter().flat_map(|g| g.keys()) {
        // what no group uses says nothing
        let used = groups.iter().any(|g| g.get(key).is_some_and(|v| !v.is_null() && v != false));
        if used && !columns.contains(&key.as_str()) {
            columns.push(key);
        }
    }
    let first = ["name", "lr", "initial_lr", "weight_decay", "betas", "eps", "momentum"];
    columns.sort_by_key(|c| first.iter().position(|f| f == c).unwrap_or(first.len()));
    let cell = |v: Option<&Value>| match v {
        None | Some(Value::Null) => "-".to_owned(),
        Some(Value::String(s)) => clean(s),
        Some(Value::Array(items)) if items.len() > 2 => items.len().to_string(),
        Some(other) => clean(&other.to_string()),
    };
    let head = std::iter::once("GROUP".to_owned()).chain(columns.iter().map(|c| clean(&c.to_uppercase())));
    let mut rows: Vec<Vec<String>> = vec![head.collect()];
    rows.extend(groups.iter().enumerate().map(|(i, g)| {
        std::iter::once(i.to_string()).chain(columns.iter().map(|c| cell(g.get(*c)))).collect()
    }));
    if groups.is_empty() { String::new() } else { aligned(&rows) }
}

/// Columns two spaces apart; the last isn't padded.
fn aligned(rows: &[Vec<String>]) -> String {
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let width = |c: usize| rows.iter().filter_map(|r| r.get(c)).map(|s| s.chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..columns).map(width).collect();
    let padded = |(s, w): (&String, &usize)| format!("{s:<w$}");
    let line = |row: &Vec<String>| row.iter().zip(&widths).map(padded).collect::<Vec<_>>().join("  ");
    rows.iter().map(|row| line(row).trim_end().to_owned() + "\n").collect()
}

/// Role, dtype, shape and name of each tensor.
fn table(tensors: &[TensorInfo]) -> String {
    let shape = |t: &TensorInfo| t.shape.iter().map(u64::to_string).collect::<Vec<_>>().join(" × ");
    let mut rows = vec![["ROLE", "DTYPE", "SHAPE", "NAME"].map(str::to_owned).to_vec()];
    rows.extend(
        tensors
            .iter()
            .map(|t| vec![t.role.to_string(), t.dtype.to_string(), or(shape(t), "scalar"), clean(&t.name)]),
    );
    aligned(&rows)
}

/// What comes from a file must not steer the terminal.
pub(super) fn clean(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { '\u{fffd}' } else { c }).collect()
}

/// `1234567` as `1.23 MB`.
pub(super) fn human(bytes: u64) -> String {
    const UNITS: [&str; 5] = ["kB", "MB", "GB", "TB", "PB"];
    let (mut value, mut unit) = (bytes as f64 / 1e3, 0);
    if bytes < 1000 {
        return format!("{bytes} B");
    }
    while value >= 999.95 && unit + 1 < UNITS.len() {
        value /= 1e3;
        unit += 1;
    }
    format!("{value:.2} {}", UNITS[unit])
}

#[cfg(test)]
mod tests {
    use super::*;
    use ckpt::Dtype;

    #[test]
    fn tables_are_aligned_and_names_cannot_steer_the_terminal() {
        let t = |role, shape: &[u64], name: &str| TensorInfo {
            name: name.into(),
            role,
            dtype: Dtype::F32,
            shape: shape.into(),
        };
        let text = table(&[t(Role::Weight, &[16, 8], "a\x1b[2J"), t(Role::ExpAvgSq, &[], "b")]);
        assert_eq!(
            text,
            "ROLE        DTYPE  SHAPE   NAME\nweight      F32    16 × 8  a\u{fffd}[2J\nexp_avg_sq  F32    scalar  b\n"
        );
    }

    #[test]
    fn a_description_says_what_is_there_and_what_is_missing() {
        let dir = tempfile::tempdir().expect("a directory");
        let checkpoint = Checkpoint::open(&crate::cmd::ckpt::tests::saved(dir.path())).expect("complete");
        let text = native(&checkpoint);
        for line in [
            "step        3\n",
            "stage       2\n",
            "weight      1 tensors, 4 elements, F32\n",
            "ties        head = w\n",
            "\nGROUP  LR\n0      0.1\n",
            "cursor      {\"epoch\":1}\n",
            "missing     optimizer state, rng facts, job, tokenizer\n",
            "\nROLE    DTYPE  SHAPE  NAME\nweight  F32    2 × 2  w\n",
        ] {
            assert!(text.contains(line), "{text} lacks {line}");
        }
    }

    #[test]
    fn a_description_of_a_deepspeed_folder() {
        let golden =
            std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../worker/ckpt/tests/golden/z1_tied");
        let ckpt::Found::Foreign(checkpoint) = ckpt::find(&golden).expect("whole") else {
            panic!("of DeepSpeed")
        };
        let text = foreign(&checkpoint);
        for line in [
            "kind        DeepSpeed\n",
            "writer      DeepSpeed 0.19.8\n",
            "step        3\n",
            "weight      20 tensors, ",
            "ties        lm_head.weight = model.embed_tokens.weight\n",
            "scheduler   {\"last_batch_iteration\":2}\n",
            "missing     random states, config.json, tokenizer\n",
            "\nGROUP  LR ",
            "  model.embed_tokens.weight\n",
        ] {
            assert!(text.contains(line), "{text} lacks {line}");
        }
        let all = foreign_json(&checkpoint);
        assert_eq!((&all["kind"], &all["world"], &all["stage"]), (&json!("DeepSpeed"), &json!(1), &json!(1)));
        assert_eq!(all["tensors"].as_array().map(Vec::len), Some(60));
    }

    #[test]
    fn groups_are_rows_and_unused_settings_are_left_out() {
        let groups = json!([
            {"lr": 0.001, "betas": [0.9, 0.98], "amsgrad": false, "foreach": null, "weight_decay": 0.1, "params": ["a", "b", "c"]},
            {"lr": 0.001, "betas": [0.9, 0.98], "amsgrad": false, "foreach": null, "weight_decay": 0.0, "params": []},
        ]);
        let text = group_table(&groups);
        assert_eq!(text.lines().count(), 3, "{text}");
        assert!(!text.contains("AMSGRAD") && !text.contains("FOREACH"), "{text}");
        assert!(
            text.contains("[0.9,0.98]") && text.lines().nth(1).is_some_and(|l| l.contains('3')),
            "{text}"
        );
        assert_eq!(group_table(&Value::Null), "");
    }
}
