//! Tests gathered weights against a brute-force rounding, and outputs that a gather rejects.
use super::*;
use crate::codec::safetensors::{SafetensorsEntry, read_header};
use crate::error::{CkptError, OutputProblem};
use crate::layout::native::Checkpoint;
use crate::save::commit_save;
use crate::tensor::Dtype;
use crate::{GatherOptions, gather_weights, gather_weights_until};
use serde_json::Value;
use std::fs;
use std::ops::ControlFlow;

fn make_gather_options(dtype: Option<Dtype>, max_shard_size: u64) -> GatherOptions {
    GatherOptions { dtype, max_shard_size, ..GatherOptions::default() }
}

/// Reads every tensor of a gathered directory. Returns the header's entry, the name of the file,
/// and the bytes of each tensor.
fn read_gathered_tensors(dir: &Path) -> Vec<(SafetensorsEntry, String, Vec<u8>)> {
    let mut tensors = Vec::new();
    for name in list_entry_names(dir).into_iter().filter(|n| n.ends_with(".safetensors")) {
        let file = fs::read(dir.join(&name)).expect("read");
        let read = |at: u64, out: &mut [u8]| {
            out.copy_from_slice(&file[at as usize..at as usize + out.len()]);
            Ok(())
        };
        let header = read_header(file.len() as u64, read).expect("sound");
        assert_eq!(header.metadata["format"], "pt");
        for e in header.entries {
            let bytes = file[e.bytes.start as usize..e.bytes.end as usize].to_vec();
            tensors.push((e, name.clone(), bytes));
        }
    }
    tensors
}

/// Returns the 16-bit pattern whose value, as `decode` defines it, is nearest to `x`. Of two
/// equally near patterns, returns the even one.
fn round_to_nearest(x: f32, decode: impl Fn(u16) -> f64) -> u16 {
    let sign = if x.is_sign_negative() { 0x8000 } else { 0 };
    let x = f64::from(x.abs());
    // finite patterns of one sign are sorted by value
    let (mut low, mut high) = (0u16, 0x7fffu16);
    while low < high {
        let middle = low + (high - low).div_ceil(2);
        match decode(middle) <= x {
            true => low = middle,
            false => high = middle - 1,
        }
    }
    let (below, above) = (decode(low), decode(low + 1));
    let up = x - below > above - x || (x - below == above - x && low % 2 == 1);
    sign | (low + u16::from(up))
}

fn decode_bf16(bits: u16) -> f64 {
    let x = f32::from_bits(u32::from(bits) << 16);
    if x.is_nan() { f64::INFINITY } else { f64::from(x) }
}

fn decode_f16(bits: u16) -> f64 {
    let (exponent, mantissa) = (i32::from(bits >> 10 & 31), f64::from(bits & 1023));
    match exponent {
        0 => mantissa * 2f64.powi(-24),
        31 => f64::INFINITY,
        _ => (1.0 + mantissa / 1024.0) * 2f64.powi(exponent - 15),
    }
}

/// Encodes values as the bytes that a gather must write for the dtype `dtype`.
fn encode_expected(dtype: Dtype, values: &[f32]) -> Vec<u8> {
    let narrow = |decode: fn(u16) -> f64| {
        values.iter().flat_map(|&x| round_to_nearest(x, decode).to_le_bytes()).collect()
    };
    match dtype {
        Dtype::BF16 => narrow(decode_bf16),
        Dtype::F16 => narrow(decode_f16),
        _ => values.iter().flat_map(|x| x.to_le_bytes()).collect(),
    }
}

const WEIGHTS: &[(&str, &[u64])] =
    &[("model.embed", &[50, 8]), ("model.empty", &[0, 3]), ("model.norm", &[8]), ("model.proj", &[8, 30])];

#[test]
fn weights_are_rounded_to_the_nearest_value() {
    let dir = make_memory_dir();
    let mut facts = make_facts(4, 3, WEIGHTS);
    facts.model.ties =
        vec![crate::TiedWeight { alias: "lm_head.weight".into(), target: "model.embed".into() }];
    facts.model.hf_config = json!({"model_type": "llama", "dtype": "float64", "tie_word_embeddings": true});
    let checkpoint =
        Checkpoint::open(&save_checkpoint(dir.path(), &facts).expect("saved").path).expect("complete");
    for (dtype, given) in
        [(Dtype::F32, None), (Dtype::BF16, Some(Dtype::BF16)), (Dtype::F16, Some(Dtype::F16))]
    {
        let out = dir.path().join(dtype.to_string());
        let mut last = (0, 0);
        let report =
            gather_weights(&checkpoint, &out, &make_gather_options(given, 5_000_000_000), |done, total| {
                last = (done, total)
            });
        let report = report.expect("gathered");
        assert_eq!(
            list_entry_names(&out),
            ["config.json", "gathered.json", "model.safetensors", "tokenizer_config.json"]
        );
        let tensors = read_gathered_tensors(&out);
        let order: Vec<&str> = tensors.iter().map(|(e, ..)| e.name.as_str()).collect();
        assert_eq!(order.len(), 4, "every weight once and no alias: {order:?}");
        for (e, _, bytes) in &tensors {
            let w = facts.model.weights.iter().find(|w| w.name == e.name).expect("a weight");
            assert_eq!((e.dtype, &e.shape), (dtype, &w.shape));
            let values = compute_values(TensorRole::Weight, &w.name, &facts, count_elements(w));
            assert_eq!(*bytes, encode_expected(dtype, &values), "{} as {dtype}", e.name);
        }
        let total = 648 * dtype.size();
        assert_eq!((report.bytes, report.tensors, last), (total, 4, (total, total)));
        let config: Value =
            serde_json::from_slice(&fs::read(out.join("config.json")).expect("read")).expect("JSON");
        assert_eq!(config["dtype"], dtype.torch_name());
        assert_eq!(config.get("torch_dtype"), None, "the source has only the newer name");
        assert_eq!(config["tie_word_embeddings"], true);
        assert_eq!(fs::read_to_string(out.join("tokenizer_config.json")).expect("read"), "{}");
    }
}

/// Saves a checkpoint of one rank with the weight `before` and the weight `w`, whose elements are
/// `data`. Opens the checkpoint.
fn save_values_as_weight(root: &Path, data: &[f32]) -> Checkpoint {
    let facts = make_facts(1, 1, &[("before", &[2]), ("w", &[data.len() as u64])]);
    let staging = StagingDir::create(root, 1, data.len() as u64 * 4).expect("begun");
    let pieces = [
        TensorPiece {
            name: "before",
            role: TensorRole::Weight,
            start_element: 0,
            data: (&[0.5, 0.25][..]).into(),
        },
        TensorPiece { name: "w", role: TensorRole::Weight, start_element: 0, data: data.into() },
    ];
    let report = write_shard(staging.path(), 0, 1, &pieces).expect("written");
    Checkpoint::open(&commit_save(staging, facts, vec![report]).expect("complete").path).expect("complete")
}

#[test]
fn ties_extremes_and_specials_round_to_the_nearest_even() {
    let mut data =
        vec![0.0, -0.0, 65504.0, -65504.0, 65519.9, 6.1e-5, 5.96e-8, 2.9802322e-8, 2.9802326e-8, 1e-30];
    for bits in
        [0x3f80_8000u32, 0x3f81_8000, 0x3f80_8001, 0x3f80_7fff, 0x3f7f_ffff, 0x3f80_1000, 0x3f80_3000, 1]
    {
        data.extend([f32::from_bits(bits), -f32::from_bits(bits)]);
    }
    let dir = make_memory_dir();
    let checkpoint = save_values_as_weight(&dir.path().join("root"), &data);
    for dtype in [Dtype::BF16, Dtype::F16] {
        let out = dir.path().join(dtype.to_string());
        gather_weights(&checkpoint, &out, &make_gather_options(Some(dtype), 1 << 30), |_, _| ())
            .expect("gathered");
        assert_eq!(read_gathered_tensors(&out)[1].2, encode_expected(dtype, &data), "{dtype}");
    }
    // values that aren't finite are kept
    let specials = [f32::INFINITY, f32::NEG_INFINITY, f32::NAN];
    let checkpoint = save_values_as_weight(&dir.path().join("specials"), &specials);
    let out = dir.path().join("out");
    gather_weights(&checkpoint, &out, &make_gather_options(Some(Dtype::F16), 1 << 30), |_, _| ())
        .expect("gathered");
    let bits: Vec<u16> =
        read_gathered_tensors(&out)[1].2.chunks(2).map(|b| u16::from_le_bytes([b[0], b[1]])).collect();
    assert_eq!(bits[..2], [0x7c00, 0xfc00]);
    assert!(bits[2] & 0x7c00 == 0x7c00 && bits[2] & 0x3ff != 0, "{:#x} is a NaN", bits[2]);
}

#[test]
fn a_value_outside_of_the_range_is_an_error() {
    let dir = make_memory_dir();
    for (dtype, value) in [(Dtype::F16, 65520.0), (Dtype::F16, -1e9), (Dtype::BF16, f32::MAX)] {
        let checkpoint = save_values_as_weight(&dir.path().join("root"), &[1.0, 2.0, value, value]);
        let out = dir.path().join("out");
        let error = gather_weights(&checkpoint, &out, &make_gather_options(Some(dtype), 1 << 30), |_, _| ())
            .expect_err("rejected");
        assert!(
            matches!(&error, CkptError::ValueOverflow { tensor, element: 2, .. } if tensor == "w"),
            "{error:?}"
        );
        assert_eq!(list_entry_names(dir.path()), ["root"], "no output remains");
    }
}

#[test]
fn large_models_are_split_with_an_index() {
    let dir = make_memory_dir();
    let facts = make_facts(1, 2, WEIGHTS);
    let checkpoint =
        Checkpoint::open(&save_checkpoint(&dir.path().join("root"), &facts).expect("saved").path)
            .expect("complete");
    let out = dir.path().join("new/hf");
    let report =
        gather_weights(&checkpoint, &out, &make_gather_options(None, 1000), |_, _| ()).expect("gathered");
    let names: Vec<&str> = report.files.iter().map(|f| f.name.as_str()).collect();
    assert_eq!(names, ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]);
    let index = fs::read_to_string(out.join("model.safetensors.index.json")).expect("read");
    let index: Value = serde_json::from_str(&index).expect("JSON");
    assert_eq!(index["metadata"]["total_size"], 648 * 4);
    assert_eq!(index["metadata"]["total_parameters"], 648);
    let map = index["weight_map"].as_object().expect("an object");
    let tensors = read_gathered_tensors(&out);
    assert_eq!((map.len(), tensors.len()), (4, 4));
    for (e, file, bytes) in tensors {
        assert_eq!(map[&e.name], file.as_str());
        let w = facts.model.weights.iter().find(|w| w.name == e.name).expect("a weight");
        assert_eq!(
            bytes,
            encode_expected(
                Dtype::F32,
                &compute_values(TensorRole::Weight, &w.name, &facts, count_elements(w))
            )
        );
    }
    let generation: Value =
        serde_json::from_slice(&fs::read(out.join("generation_config.json")).expect("read")).expect("JSON");
    assert_eq!(generation["eos_token_id"], 2);
}

#[test]
fn an_interrupted_gather_leaves_the_output_unchanged() {
    let dir = make_memory_dir();
    let facts = make_facts(1, 2, WEIGHTS);
    let checkpoint =
        Checkpoint::open(&save_checkpoint(&dir.path().join("root"), &facts).expect("saved").path)
            .expect("complete");
    let (new, existing) = (dir.path().join("new"), dir.path().join("existing"));
    let options = GatherOptions { force: true, ..make_gather_options(None, 1000) };
    gather_weights(&checkpoint, &existing, &options, |_, _| ()).expect("gathered");
    let before = fs::read(existing.join("gathered.json")).expect("read");
    for out in [&new, &existing] {
        let mut calls = 0;
        let gathered = gather_weights_until(&checkpoint, out, &options, |done, total| {
            calls += 1;
            assert!(done < total, "the gather was interrupted before the end");
            ControlFlow::Break(())
        });
        assert!(gathered.expect("no error").is_none());
        assert_eq!(calls, 1);
    }
    assert_eq!(fs::read(existing.join("gathered.json")).expect("read"), before);
    assert_eq!(list_entry_names(dir.path()), ["existing", "root"], "no temporary directories remain");
}

#[test]
fn only_gathered_directories_are_replaced() {
    let dir = make_memory_dir();
    let root = dir.path().join("root");
    let checkpoint =
        Checkpoint::open(&save_checkpoint(&root, &make_facts(1, 1, WEIGHTS)).expect("saved").path)
            .expect("complete");
    let out = dir.path().join("out");
    let run = |out: &Path, force: bool| {
        gather_weights(&checkpoint, out, &GatherOptions { force, ..GatherOptions::default() }, |_, _| ())
            .map(drop)
    };
    let problem = |out: &Path, force: bool| match run(out, force) {
        Err(CkptError::OutputRejected { problem, .. }) => problem,
        other => panic!("{other:?}"),
    };
    let operation = "`launch ckpt gather`";
    fs::create_dir(&out).expect("made");
    run(&out, false).expect("an empty directory is replaced");
    assert_eq!(problem(&out, false), OutputProblem::NeedsForce { operation });
    run(&out, true).expect("a gathered directory is replaced");
    fs::write(out.join("notes.txt"), "mine").expect("written");
    assert_eq!(problem(&out, true), OutputProblem::OtherFile { file: "notes.txt".into(), operation });
    assert_eq!(fs::read_to_string(out.join("notes.txt")).expect("exists"), "mine");
    assert_eq!(problem(checkpoint.path(), true), OutputProblem::NotOurs { operation });
    assert_eq!(problem(&checkpoint.path().join("hf"), true), OutputProblem::InsideInput);
    assert_eq!(problem(&root.join("latest"), true), OutputProblem::NotADirectory);
    assert!(run(Path::new("/"), true).is_err());
    assert_eq!(list_entry_names(dir.path()), ["out", "root"], "no temporary directories remain");
    assert!(crate::verify_checkpoints(&root).expect("there").is_sound());
}

#[test]
fn damage_is_not_gathered() {
    let dir = make_memory_dir();
    let path = save_checkpoint(&dir.path().join("root"), &make_facts(1, 1, WEIGHTS)).expect("saved").path;
    let shard = path.join("shard-00000-of-00001.safetensors");
    let mut bytes = fs::read(&shard).expect("read");
    let at = bytes.len() - 3000;
    bytes[at] ^= 1;
    fs::write(&shard, bytes).expect("written");
    let checkpoint = Checkpoint::open(&path).expect("sizes are right");
    let error =
        gather_weights(&checkpoint, &dir.path().join("out"), &make_gather_options(None, 1000), |_, _| ())
            .expect_err("damaged");
    assert!(error.is_checkpoint_at_fault(), "{error}");
    assert_eq!(list_entry_names(dir.path()), ["root"]);
}

/// The child process of `extra_memory_of_a_gather_is_bounded`. Gathers a large checkpoint, and
/// writes the memory that the gather took, in KiB, to the file `extra`. Does nothing outside of a
/// child process.
#[test]
fn child_process_that_measures_memory() {
    let Some(dir) = read_child_argument() else { return };
    let dir = Path::new(&dir);
    let kilobytes = |key: &str| -> u64 {
        let status = fs::read_to_string("/proc/self/status").expect("read");
        let line = status.lines().find(|l| l.starts_with(key)).expect("a line");
        line.split_whitespace().nth(1).and_then(|n| n.parse().ok()).expect("a number")
    };
    let before = kilobytes("VmRSS");
    let checkpoint = Checkpoint::open(&dir.join("step-00000001")).expect("complete");
    gather_weights(
        &checkpoint,
        &dir.join("out"),
        &make_gather_options(Some(Dtype::BF16), 1 << 30),
        |_, _| (),
    )
    .expect("gathered");
    fs::write(dir.join("extra"), (kilobytes("VmHWM") - before).to_string()).expect("written");
}

/// Gathers 300 MB of weights in one tensor, and asserts that the gather takes at most 160 MB of
/// memory, less than a copy of the tensor.
#[test]
fn extra_memory_of_a_gather_is_bounded() {
    let dir = tempfile::tempdir().expect("a directory");
    let data: Vec<f32> = (0..75_000_000u32).map(|i| (i % 65_536) as f32).collect();
    drop(save_values_as_weight(dir.path(), &data));
    let output = run_child_test(
        "tests::gather::child_process_that_measures_memory",
        &dir.path().display().to_string(),
    );
    assert!(output.status.success(), "{output:?}");
    let extra: u64 =
        fs::read_to_string(dir.path().join("extra")).expect("written").parse().expect("a number");
    println!("gathering 300 MB took {extra} KiB");
    assert!(extra * 1024 <= 160_000_000, "gathering took {extra} KiB, more than its fixed windows");
    let file = fs::read(dir.path().join("out/model.safetensors")).expect("read");
    let tail: Vec<u8> =
        data[74_990_000..].iter().flat_map(|&x| round_to_nearest(x, decode_bf16).to_le_bytes()).collect();
    assert_eq!(file[file.len() - tail.len()..], tail);
}
