//! Creates a ZeRO-2 checkpoint of any size in sparse files: almost all elements are zeros, stored
//! as holes.
//!
//! Measures the memory and time of operations on large checkpoints without the disk space for them.
//!
//! `cargo run -p ckpt --release --example sparse_zero -- DIR BYTES [RANKS]`
use crc32fast::Hasher;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// Elements of each weight except the last.
const WEIGHT: u64 = 64 << 20;
/// Bytes per parameter: FP32 weight, both moments of Adam, and the module's BF16 weight.
const PER_ELEMENT: u64 = 14;
/// Distance of the elements of the flat group that aren't zero.
const MARK_EVERY: u64 = 10_000_019;
/// Alignment of zip members, which is torch's.
const ALIGNMENT: u64 = 64;

#[allow(dead_code)] // tests include this file without `main`
fn main() -> io::Result<()> {
    let usage = || io::Error::other("usage: sparse_zero DIR BYTES [RANKS]");
    let mut args = std::env::args().skip(1);
    let dir = args.next().ok_or_else(usage)?;
    let bytes: u64 = args.next().and_then(|a| a.parse().ok()).ok_or_else(usage)?;
    let ranks = args.next().map_or(Some(2), |a| a.parse().ok()).ok_or_else(usage)?;
    make(Path::new(&dir), bytes / PER_ELEMENT / (2 * ranks) * (2 * ranks), ranks, true)
}

/// The shapes of the weights `layers.I.weight`, which have `elements` elements in total.
pub(crate) fn shapes(elements: u64) -> Vec<[u64; 2]> {
    let whole = (0..elements / WEIGHT).map(|_| [WEIGHT / 4096, 4096]);
    let rest = elements % WEIGHT;
    whole.chain((rest != 0).then_some([1, rest])).collect()
}

/// Element `i` of the flat group of weights, first moments or second moments (`role` 0, 1 or 2).
pub(crate) fn value(i: u64, role: u64) -> f32 {
    if i.is_multiple_of(MARK_EVERY) { (3 * (i / MARK_EVERY) + role + 1) as f32 } else { 0.0 }
}

/// Writes a checkpoint of `ranks` ranks with `elements` parameters, with or without moments, into
/// `dir`.
///
/// # Panics
/// When `elements` is not a positive multiple of `2 * ranks`.
pub(crate) fn make(dir: &Path, elements: u64, ranks: u64, moments: bool) -> io::Result<()> {
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
            &optimizer(per_rank, ranks, moments),
            storages,
        )?;
    }
    let module = SparseStorage { bytes: 2 * elements, marks: Vec::new() };
    let model = model(&shapes(elements), elements, ranks);
    write_torch_file(
        &tag.join("mp_rank_00_model_states.pt"),
        "mp_rank_00_model_states",
        &model,
        vec![module],
    )?;
    std::fs::write(dir.join("latest"), "global_step3")
}

/// A storage that is a hole except for a few numbers.
struct SparseStorage {
    bytes: u64,
    /// The numbers, with ascending byte offsets.
    marks: Vec<(u64, [u8; 4])>,
}

impl SparseStorage {
    /// Elements `range` of a flat group.
    fn new(range: std::ops::Range<u64>, role: u64) -> SparseStorage {
        let first = range.start.next_multiple_of(MARK_EVERY);
        let marked = (first..range.end).step_by(MARK_EVERY as usize);
        let mark = |i: u64| (4 * (i - range.start), value(i, role).to_le_bytes());
        SparseStorage { bytes: 4 * (range.end - range.start), marks: marked.map(mark).collect() }
    }

    fn crc(&self) -> u32 {
        let (mut crc, mut at) = (Hasher::new(), 0);
        for (place, bytes) in &self.marks {
            crc.combine(&zeros(place - at));
            crc.update(bytes);
            at = place + 4;
        }
        crc.combine(&zeros(self.bytes - at));
        crc.finalize()
    }
}

/// The CRC-32 of `count` zero bytes, combined from those of powers of two.
fn zeros(mut count: u64) -> Hasher {
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

/// Writes a torch file: a zip of stored members with 64-bit sizes and offsets.
fn write_torch_file(path: &Path, root: &str, pickle: &[u8], storages: Vec<SparseStorage>) -> io::Result<()> {
    let file = File::create_new(path)?;
    let (mut at, mut directory, mut count) = (0u64, Vec::new(), 0u64);
    let mut member = |name: String, bytes: u64, crc: u32, pieces: &[(u64, &[u8])]| -> io::Result<()> {
        let name = format!("{root}/{name}");
        let mut header = [b"PK\x03\x04".as_slice(), &[45, 0, 0, 8], &[0; 18]].concat();
        header.extend((name.len() as u16).to_le_bytes());
        let begin = at + header.len() as u64 + 2 + name.len() as u64;
        let filler = (begin + 4).next_multiple_of(ALIGNMENT) - begin - 4;
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
        let pieces: Vec<(u64, &[u8])> = storage.marks.iter().map(|(at, b)| (*at, b.as_slice())).collect();
        member(format!("data/{i}"), storage.bytes, storage.crc(), &pieces)?;
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

/// A writer of pickle protocol 2 with the opcodes that these files need.
struct Pickle(Vec<u8>);

/// A function that writes one value.
type Value<'a> = &'a dyn Fn(&mut Pickle);

impl Pickle {
    fn text(&mut self, text: &str) {
        self.0.push(b'X');
        self.0.extend((text.len() as u32).to_le_bytes());
        self.0.extend(text.as_bytes());
    }

    fn int(&mut self, n: u64) {
        self.0.extend([0x8a, 8]);
        self.0.extend(n.to_le_bytes());
    }

    fn ints(&mut self, values: &[u64]) {
        self.0.push(b'(');
        values.iter().for_each(|&n| self.int(n));
        self.0.push(b't');
    }

    fn dict(&mut self, pairs: &[(&str, Value<'_>)]) {
        self.0.extend(b"}(");
        for (key, value) in pairs {
            self.text(key);
            value(self);
        }
        self.0.push(b'u');
    }

    fn list(&mut self, items: &[Value<'_>]) {
        self.0.extend(b"](");
        items.iter().for_each(|item| item(self));
        self.0.push(b'e');
    }

    /// A tensor at `offset` of a storage of `stored` elements.
    fn tensor(&mut self, class: &str, storage: u64, stored: u64, offset: u64, shape: &[u64]) {
        self.0.extend(b"ctorch._utils\n_rebuild_tensor_v2\n((");
        self.text("storage");
        self.0.extend(format!("ctorch\n{class}\n").bytes());
        self.text(&storage.to_string());
        self.text("cpu");
        self.int(stored);
        self.0.extend(b"tQ");
        self.int(offset);
        self.ints(shape);
        let strides: Vec<u64> = (0..shape.len()).map(|i| shape[i + 1..].iter().product()).collect();
        self.ints(&strides);
        self.0.extend(b"\x89ccollections\nOrderedDict\n)RtR");
    }
}

fn pickle_dict(pairs: &[(&str, Value<'_>)]) -> Vec<u8> {
    let mut pickle = Pickle(b"\x80\x02".to_vec());
    pickle.dict(pairs);
    pickle.0.push(b'.');
    pickle.0
}

fn none(p: &mut Pickle) {
    p.0.push(b'N');
}

/// The pickle of a rank's optimizer file.
fn optimizer(part: u64, ranks: u64, moments: bool) -> Vec<u8> {
    let flat = |role: u64| move |p: &mut Pickle| p.tensor("FloatStorage", role, part, 0, &[part]);
    let (weights, first, second) = (flat(0), flat(1), flat(2));
    let three = |p: &mut Pickle| p.int(3);
    let states = |p: &mut Pickle| match moments {
        true => p.dict(&[("step", &three), ("exp_avg", &first), ("exp_avg_sq", &second)]),
        false => p.dict(&[]),
    };
    let state = |p: &mut Pickle| {
        p.0.extend(b"}");
        p.int(0);
        states(p);
        p.0.push(b's');
    };
    let params = |p: &mut Pickle| p.list(&[&|p| p.int(0)]);
    let group = |p: &mut Pickle| p.dict(&[("params", &params)]);
    let groups = |p: &mut Pickle| p.list(&[&group]);
    let base = |p: &mut Pickle| p.dict(&[("state", &state), ("param_groups", &groups)]);
    let optimizer = |p: &mut Pickle| {
        p.dict(&[
            ("zero_stage", &|p| p.int(2)),
            ("partition_count", &|p| p.list(&[&|p| p.int(ranks)])),
            ("group_paddings", &|p| p.list(&[&|p| p.int(0)])),
            ("base_optimizer_state", &base),
            ("single_partition_of_fp32_groups", &|p| p.list(&[&weights])),
        ]);
    };
    pickle_dict(&[("optimizer_state_dict", &optimizer), ("ds_version", &|p| p.text("0.19.8"))])
}

/// The pickle of the model file.
fn model(shapes: &[[u64; 2]], elements: u64, ranks: u64) -> Vec<u8> {
    let named = |p: &mut Pickle, value: &dyn Fn(&mut Pickle, usize)| {
        p.0.extend(b"}(");
        for i in 0..shapes.len() {
            p.text(&format!("layers.{i}.weight"));
            value(p, i);
        }
        p.0.push(b'u');
    };
    let module = |p: &mut Pickle| {
        named(p, &|p, i| p.tensor("BFloat16Storage", 0, elements, i as u64 * WEIGHT, &shapes[i]));
    };
    let sizes = |p: &mut Pickle| {
        named(p, &|p, i| {
            p.0.extend(b"ctorch\nSize\n");
            p.ints(&shapes[i]);
            p.0.extend(b"\x85R");
        });
    };
    let count = |n: u64| move |p: &mut Pickle| p.int(n);
    pickle_dict(&[
        ("module", &module),
        ("buffer_names", &|p| p.list(&[])),
        ("optimizer", &none),
        ("param_shapes", &|p| p.list(&[&sizes])),
        ("frozen_param_shapes", &none),
        ("shared_params", &|p| p.dict(&[])),
        ("frozen_param_fragments", &none),
        ("lr_scheduler", &none),
        ("skipped_steps", &count(0)),
        ("global_steps", &count(3)),
        ("dp_world_size", &count(ranks)),
        ("mp_world_size", &count(1)),
        ("ds_version", &|p| p.text("0.19.8")),
    ])
}
