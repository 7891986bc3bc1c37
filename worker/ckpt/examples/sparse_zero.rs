//! Creates a ZeRO-2 checkpoint of any size for tests, in sparse files that take little disk space.
//!
//! Such a checkpoint serves to measure the memory and time of operations on large checkpoints with
//! little disk space.
//!
//! `cargo run -p ckpt --release --example sparse_zero -- DIR BYTES [RANKS]`
use crc32fast::Hasher;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// Number of elements of each weight of the test checkpoint, except the last one, which may be
/// smaller.
const WEIGHT_ELEMENTS: u64 = 64 << 20;
/// Bytes that the test checkpoint stores per parameter: the FP32 weight, both moments of Adam, and
/// the BF16 weight in the model file.
const BYTES_PER_PARAM: u64 = 14;
/// The distance between two nonzero elements in the concatenated weights of the test checkpoint, in
/// elements.
const NONZERO_DISTANCE: u64 = 10_000_019;
/// Alignment in bytes of the data of zip members in files that `torch.save` writes.
const ZIP_ALIGNMENT: u64 = 64;

#[allow(dead_code)] // tests include this file without `main`
fn main() -> io::Result<()> {
    let usage = || io::Error::other("usage: sparse_zero DIR BYTES [RANKS]");
    let mut args = std::env::args().skip(1);
    let dir = args.next().ok_or_else(usage)?;
    let bytes: u64 = args.next().and_then(|a| a.parse().ok()).ok_or_else(usage)?;
    let ranks = args.next().map_or(Some(2), |a| a.parse().ok()).ok_or_else(usage)?;
    write_checkpoint(Path::new(&dir), bytes / BYTES_PER_PARAM / (2 * ranks) * (2 * ranks), ranks, true)
}

/// Returns the shapes of the test checkpoint's weights `layers.0.weight`, `layers.1.weight` and so
/// on, for `elements` elements in total.
pub(crate) fn list_weight_shapes(elements: u64) -> Vec<[u64; 2]> {
    let whole = (0..elements / WEIGHT_ELEMENTS).map(|_| [WEIGHT_ELEMENTS / 4096, 4096]);
    let rest = elements % WEIGHT_ELEMENTS;
    whole.chain((rest != 0).then_some([1, rest])).collect()
}

/// Computes element `i` of the test data: of all weights one after another (`role` 0), of Adam's
/// first moments (1) or of its second moments (2).
pub(crate) fn compute_test_element(i: u64, role: u64) -> f32 {
    if i.is_multiple_of(NONZERO_DISTANCE) { (3 * (i / NONZERO_DISTANCE) + role + 1) as f32 } else { 0.0 }
}

/// Writes a checkpoint of `ranks` ranks with `elements` parameters to the directory `dir`. Includes
/// Adam's moments if `moments` is true.
///
/// # Panics
/// Panics if `elements` is not a positive multiple of `2 * ranks`.
pub(crate) fn write_checkpoint(dir: &Path, elements: u64, ranks: u64, moments: bool) -> io::Result<()> {
    assert!(
        elements > 0 && elements.is_multiple_of(2 * ranks),
        "elements must be a positive multiple of 2 * ranks"
    );
    let tag = dir.join("global_step3");
    std::fs::create_dir_all(&tag)?;
    let per_rank = elements / ranks;
    for rank in 0..ranks {
        let roles: &[u64] = if moments { &[0, 1, 2] } else { &[0] };
        let storages = roles
            .iter()
            .map(|&role| SparseStorage::new(rank * per_rank..(rank + 1) * per_rank, role))
            .collect();
        let stem = format!("zero_pp_rank_{rank}_mp_rank_00_optim_states");
        write_torch_file(
            &tag.join(format!("{stem}.pt")),
            &stem,
            &encode_optimizer_pickle(per_rank, ranks, moments),
            storages,
        )?;
    }
    let module = SparseStorage { bytes: 2 * elements, nonzero_values: Vec::new() };
    let model = encode_model_pickle(&list_weight_shapes(elements), elements, ranks);
    write_torch_file(
        &tag.join("mp_rank_00_model_states.pt"),
        "mp_rank_00_model_states",
        &model,
        vec![module],
    )?;
    std::fs::write(dir.join("latest"), "global_step3")
}

/// The content of a tensor's storage in a torch file: zeros, except for a few F32 numbers at given
/// places.
struct SparseStorage {
    bytes: u64,
    /// Byte offset and little-endian bytes of each nonzero number, in ascending order of offsets.
    nonzero_values: Vec<(u64, [u8; 4])>,
}

impl SparseStorage {
    /// Creates the test data for the elements `range` of the checkpoint's weights if `role` is 0,
    /// or otherwise of a moment of Adam.
    fn new(range: std::ops::Range<u64>, role: u64) -> SparseStorage {
        let first = range.start.next_multiple_of(NONZERO_DISTANCE);
        let marked = (first..range.end).step_by(NONZERO_DISTANCE as usize);
        let mark = |i: u64| (4 * (i - range.start), compute_test_element(i, role).to_le_bytes());
        SparseStorage { bytes: 4 * (range.end - range.start), nonzero_values: marked.map(mark).collect() }
    }

    /// Computes the CRC-32 of the whole storage without producing its zeros in memory.
    fn compute_crc(&self) -> u32 {
        let (mut crc, mut at) = (Hasher::new(), 0);
        for (place, bytes) in &self.nonzero_values {
            crc.combine(&compute_crc_of_zeros(place - at));
            crc.update(bytes);
            at = place + 4;
        }
        crc.combine(&compute_crc_of_zeros(self.bytes - at));
        crc.finalize()
    }
}

/// Computes the CRC-32 of `count` zero bytes in O(log `count`) steps, by combining the CRCs of runs
/// whose lengths are powers of two.
fn compute_crc_of_zeros(mut count: u64) -> Hasher {
    let (mut crc, mut power) = (Hasher::new(), Hasher::new());
    power.update(&[0]);
    while count > 0 {
        if count & 1 == 1 {
            crc.combine(&power);
        }
        let half = power.clone();
        power.combine(&half);
        count >>= 1;
    }
    crc
}

/// Writes a file in the format of `torch.save`, which is a zip of uncompressed members with 64-bit
/// sizes and offsets. Zeros of the storages become holes of the file.
fn write_torch_file(path: &Path, root: &str, pickle: &[u8], storages: Vec<SparseStorage>) -> io::Result<()> {
    let file = File::create_new(path)?;
    let (mut at, mut directory, mut count) = (0u64, Vec::new(), 0u64);
    let mut member = |name: String, bytes: u64, crc: u32, pieces: &[(u64, &[u8])]| -> io::Result<()> {
        let name = format!("{root}/{name}");
        let mut header = [b"PK\x03\x04".as_slice(), &[45, 0, 0, 8], &[0; 18]].concat();
        header.extend((name.len() as u16).to_le_bytes());
        let begin = at + header.len() as u64 + 2 + name.len() as u64;
        let filler = (begin + 4).next_multiple_of(ZIP_ALIGNMENT) - begin - 4;
        header.extend((filler as u16 + 4).to_le_bytes());
        header.extend(name.as_bytes());
        header.extend(b"FB");
        header.extend((filler as u16).to_le_bytes());
        header.resize(header.len() + filler as usize, b'Z');
        file.write_all_at(&header, at)?;
        let data = at + header.len() as u64;
        for (place, piece) in pieces {
            file.write_all_at(piece, data + place)?;
        }
        directory.extend(b"PK\x01\x02\x2d\x00\x2d\x00\x00\x08\x00\x00\x00\x00\x00\x00");
        directory.extend(crc.to_le_bytes());
        directory.extend([0xff; 8]);
        directory.extend((name.len() as u16).to_le_bytes());
        directory.extend(28u16.to_le_bytes());
        directory.extend([0; 10]);
        directory.extend([0xff; 4]);
        directory.extend(name.as_bytes());
        directory.extend([1, 0, 24, 0]);
        for wide in [bytes, bytes, at] {
            directory.extend(wide.to_le_bytes());
        }
        (at, count) = (data + bytes, count + 1);
        Ok(())
    };
    let small = [("data.pkl", pickle), ("byteorder", b"little".as_slice())];
    for (name, bytes) in small {
        member(name.into(), bytes.len() as u64, crc32fast::hash(bytes), &[(0, bytes)])?;
    }
    for (i, storage) in storages.iter().enumerate() {
        let pieces: Vec<(u64, &[u8])> =
            storage.nonzero_values.iter().map(|(at, b)| (*at, b.as_slice())).collect();
        member(format!("data/{i}"), storage.bytes, storage.compute_crc(), &pieces)?;
    }
    member("version".into(), 2, crc32fast::hash(b"3\n"), &[(0, b"3\n")])?;
    let (start, length) = (at, directory.len() as u64);
    directory.extend(b"PK\x06\x06");
    directory.extend(44u64.to_le_bytes());
    directory.extend([45, 0, 45, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
    for wide in [count, count, length, start] {
        directory.extend(wide.to_le_bytes());
    }
    directory.extend(b"PK\x06\x07\x00\x00\x00\x00");
    directory.extend((start + length).to_le_bytes());
    directory.extend([1, 0, 0, 0]);
    directory.extend(b"PK\x05\x06\x00\x00\x00\x00");
    directory.extend([0xff; 12]);
    directory.extend([0, 0]);
    file.write_all_at(&directory, start)
}

/// An encoder of Python values as a pickle of protocol 2, with only those opcodes that torch files
/// need.
struct PickleWriter(Vec<u8>);

/// A function that writes one value to a pickle.
type WriteValue<'a> = &'a dyn Fn(&mut PickleWriter);

impl PickleWriter {
    fn write_text(&mut self, text: &str) {
        self.0.push(b'X');
        self.0.extend((text.len() as u32).to_le_bytes());
        self.0.extend(text.as_bytes());
    }

    fn write_int(&mut self, n: u64) {
        self.0.extend([0x8a, 8]);
        self.0.extend(n.to_le_bytes());
    }

    fn write_int_tuple(&mut self, values: &[u64]) {
        self.0.push(b'(');
        values.iter().for_each(|&n| self.write_int(n));
        self.0.push(b't');
    }

    fn write_dict(&mut self, pairs: &[(&str, WriteValue<'_>)]) {
        self.0.extend(b"}(");
        for (key, value) in pairs {
            self.write_text(key);
            value(self);
        }
        self.0.push(b'u');
    }

    fn write_list(&mut self, items: &[WriteValue<'_>]) {
        self.0.extend(b"](");
        items.iter().for_each(|item| item(self));
        self.0.push(b'e');
    }

    /// Writes a contiguous tensor to the pickle as `torch.save` does, as a reference to a storage
    /// in another zip member. The tensor begins at element `offset` of the storage with number
    /// `storage`, which has `stored` elements and the torch class `class`.
    fn write_tensor(&mut self, class: &str, storage: u64, stored: u64, offset: u64, shape: &[u64]) {
        self.0.extend(b"ctorch._utils\n_rebuild_tensor_v2\n((");
        self.write_text("storage");
        self.0.extend(format!("ctorch\n{class}\n").bytes());
        self.write_text(&storage.to_string());
        self.write_text("cpu");
        self.write_int(stored);
        self.0.extend(b"tQ");
        self.write_int(offset);
        self.write_int_tuple(shape);
        let strides: Vec<u64> = (0..shape.len()).map(|i| shape[i + 1..].iter().product()).collect();
        self.write_int_tuple(&strides);
        self.0.extend(b"\x89ccollections\nOrderedDict\n)RtR");
    }
}

/// Encodes a dict as a whole pickle, with its header and its STOP opcode.
fn encode_dict(pairs: &[(&str, WriteValue<'_>)]) -> Vec<u8> {
    let mut pickle = PickleWriter(b"\x80\x02".to_vec());
    pickle.write_dict(pairs);
    pickle.0.push(b'.');
    pickle.0
}

fn write_none(p: &mut PickleWriter) {
    p.0.push(b'N');
}

/// Encodes the content of a rank's DeepSpeed optimizer file as a pickle. `part` is the number of
/// elements that the rank stores. The pickle refers to Adam's moments if `moments` is true.
fn encode_optimizer_pickle(part: u64, ranks: u64, moments: bool) -> Vec<u8> {
    let flat = |role: u64| move |p: &mut PickleWriter| p.write_tensor("FloatStorage", role, part, 0, &[part]);
    let (weights, first, second) = (flat(0), flat(1), flat(2));
    let three = |p: &mut PickleWriter| p.write_int(3);
    let states = |p: &mut PickleWriter| match moments {
        true => p.write_dict(&[("step", &three), ("exp_avg", &first), ("exp_avg_sq", &second)]),
        false => p.write_dict(&[]),
    };
    let state = |p: &mut PickleWriter| {
        p.0.extend(b"}");
        p.write_int(0);
        states(p);
        p.0.push(b's');
    };
    let params = |p: &mut PickleWriter| p.write_list(&[&|p| p.write_int(0)]);
    let group = |p: &mut PickleWriter| p.write_dict(&[("params", &params)]);
    let groups = |p: &mut PickleWriter| p.write_list(&[&group]);
    let base = |p: &mut PickleWriter| p.write_dict(&[("state", &state), ("param_groups", &groups)]);
    let optimizer = |p: &mut PickleWriter| {
        p.write_dict(&[
            ("zero_stage", &|p| p.write_int(2)),
            ("partition_count", &|p| p.write_list(&[&|p| p.write_int(ranks)])),
            ("group_paddings", &|p| p.write_list(&[&|p| p.write_int(0)])),
            ("base_optimizer_state", &base),
            ("single_partition_of_fp32_groups", &|p| p.write_list(&[&weights])),
        ]);
    };
    encode_dict(&[("optimizer_state_dict", &optimizer), ("ds_version", &|p| p.write_text("0.19.8"))])
}

/// Encodes the content of the DeepSpeed model file as a pickle. `shapes` are the shapes of the
/// weights, and `elements` is the number of elements of all weights.
fn encode_model_pickle(shapes: &[[u64; 2]], elements: u64, ranks: u64) -> Vec<u8> {
    let named = |p: &mut PickleWriter, value: &dyn Fn(&mut PickleWriter, usize)| {
        p.0.extend(b"}(");
        for i in 0..shapes.len() {
            p.write_text(&format!("layers.{i}.weight"));
            value(p, i);
        }
        p.0.push(b'u');
    };
    let module = |p: &mut PickleWriter| {
        named(p, &|p, i| {
            p.write_tensor("BFloat16Storage", 0, elements, i as u64 * WEIGHT_ELEMENTS, &shapes[i])
        });
    };
    let sizes = |p: &mut PickleWriter| {
        named(p, &|p, i| {
            p.0.extend(b"ctorch\nSize\n");
            p.write_int_tuple(&shapes[i]);
            p.0.extend(b"\x85R");
        });
    };
    let count = |n: u64| move |p: &mut PickleWriter| p.write_int(n);
    encode_dict(&[
        ("module", &module),
        ("buffer_names", &|p| p.write_list(&[])),
        ("optimizer", &write_none),
        ("param_shapes", &|p| p.write_list(&[&sizes])),
        ("frozen_param_shapes", &write_none),
        ("shared_params", &|p| p.write_dict(&[])),
        ("frozen_param_fragments", &write_none),
        ("lr_scheduler", &write_none),
        ("skipped_steps", &count(0)),
        ("global_steps", &count(3)),
        ("dp_world_size", &count(ranks)),
        ("mp_world_size", &count(1)),
        ("ds_version", &|p| p.write_text("0.19.8")),
    ])
}
