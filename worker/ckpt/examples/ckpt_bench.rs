//! Benchmark of saving, loading, verifying and gathering checkpoints (assembling full weights from
//! shards), which prints rates in GB/s. Saving and loading are compared with plain O_DIRECT writes
//! and reads of equal size.
//!
//! `cargo run -p ckpt --release --example ckpt_bench -- DIR [GIB] [ROUNDS]`
use ckpt::{
    Checkpoint, Dtype, F32ReadRequest, GatherOptions, ModelSpec, RunFacts, StagingDir, TensorPiece,
    TensorRole, WeightShape, commit_save, gather_weights, write_shard,
};
use memmap2::MmapMut;
use std::fs::OpenOptions;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::time::Instant;

type Error = Box<dyn std::error::Error + Send + Sync>;
/// Size in bytes of each O_DIRECT read and write of plain files, which the benchmark times for
/// comparison with checkpoints.
const IO_BLOCK_BYTES: usize = 8 << 20;

fn main() -> Result<(), Error> {
    let mut args = std::env::args().skip(1);
    let dir = args.next().ok_or("usage: ckpt_bench DIR [GIB] [ROUNDS]")?;
    let gib: f64 = args.next().map_or(Ok(1.0), |a| a.parse())?;
    let rounds: usize = args.next().map_or(Ok(5), |a| a.parse())?;
    let dir = Path::new(&dir).join(format!("ckpt-bench-{}", std::process::id()));
    std::fs::create_dir_all(&dir)?;
    let elements = (gib * (1u64 << 30) as f64) as usize / 4 / 1024 * 1024;
    let mut x = 0x9E37_79B9u32;
    let data: Vec<f32> = (0..elements)
        .map(|_| {
            x ^= x << 13;
            x ^= x >> 17;
            x ^= x << 5;
            x as f32 * 1e-9
        })
        .collect();
    println!(
        "{:.2} GB, best of {rounds}, GB/s (share of O_DIRECT in the same round: median)",
        elements as f64 * 4e-9
    );
    let result = [1, 2].into_iter().try_for_each(|ranks| measure_rates(&dir, &data, ranks, rounds));
    std::fs::remove_dir_all(&dir)?;
    result
}

/// Measures how fast plain files are written and read, and how fast checkpoints are saved, loaded,
/// verified and gathered, and prints the best rates. Uses one thread per rank.
///
/// # Errors
/// Fails if an operation fails, the loaded data differ from `data`, or the checkpoint is damaged.
fn measure_rates(dir: &Path, data: &[f32], ranks: usize, rounds: usize) -> Result<(), Error> {
    let gb = data.len() as f64 * 4e-9;
    let parts: Vec<&[f32]> =
        (0..ranks).map(|r| &data[data.len() * r / ranks..data.len() * (r + 1) / ranks]).collect();
    let mut rates = [const { Vec::new() }; 6];
    for round in 0..rounds {
        let t = Instant::now();
        run_on_each_part(&parts, |r, part| {
            write_direct(&dir.join(format!("plain-{r}")), bytemuck::cast_slice(part))
        })?;
        rates[0].push(gb / t.elapsed().as_secs_f64());
        let t = Instant::now();
        let path = save_checkpoint(dir, &parts, round as u64)?;
        rates[1].push(gb / t.elapsed().as_secs_f64());
        let t = Instant::now();
        run_on_each_part(&parts, |r, part| read_direct(&dir.join(format!("plain-{r}")), part.len() * 4))?;
        rates[2].push(gb / t.elapsed().as_secs_f64());
        let mut loaded: Vec<Vec<f32>> = parts.iter().map(|p| vec![1.0; p.len()]).collect();
        let t = Instant::now();
        load_checkpoint(&path, &mut loaded)?;
        rates[3].push(gb / t.elapsed().as_secs_f64());
        if loaded.iter().zip(&parts).any(|(l, p)| l != p) {
            return Err("the loaded data differ from the saved data".into());
        }
        drop(loaded);
        let t = Instant::now();
        if !ckpt::verify_checkpoints(&path)?.is_sound() {
            return Err("the saved checkpoint is damaged".into());
        }
        rates[4].push(gb / t.elapsed().as_secs_f64());
        let t = Instant::now();
        let options = GatherOptions { dtype: Some(Dtype::BF16), force: true, ..GatherOptions::default() };
        gather_weights(&Checkpoint::open(&path)?, &dir.join("gathered"), &options, |_, _| ())?;
        rates[5].push(gb / t.elapsed().as_secs_f64());
        std::fs::remove_dir_all(path)?;
    }
    print_rates(ranks, &rates);
    Ok(())
}

/// Prints the best rate of each operation in GB/s. For saving and loading, also prints how they
/// compare with plain writes and reads, as the median ratio over all rounds in percent.
fn print_rates(ranks: usize, rates: &[Vec<f64>; 6]) {
    let best = |v: &[f64]| v.iter().copied().fold(0.0, f64::max);
    let median_share = |ours: &[f64], plain: &[f64]| {
        let mut shares: Vec<f64> = ours.iter().zip(plain).map(|(a, b)| a / b).collect();
        shares.sort_by(f64::total_cmp);
        shares[shares.len() / 2] * 100.0
    };
    let [plain_write, save, plain_read, load, verify, gather] = rates;
    println!(
        "{ranks} rank(s): write {:.2}  save {:.2} ({:.0} %)   read {:.2}  load {:.2} ({:.0} %)   verify {:.2}  gather to bf16 {:.2} (of fp32 read)",
        best(plain_write),
        best(save),
        median_share(save, plain_write),
        best(plain_read),
        best(load),
        median_share(load, plain_read),
        best(verify),
        best(gather)
    );
}

/// Calls `f` in one thread per rank, with the rank's number and the rank's part of the benchmark's
/// weight tensor. Returns the results in the order of the ranks. If some calls fail, returns the
/// error of the lowest rank that failed.
fn run_on_each_part<T: Send>(
    parts: &[&[f32]],
    f: impl Fn(usize, &[f32]) -> Result<T, Error> + Sync,
) -> Result<Vec<T>, Error> {
    std::thread::scope(|s| {
        let f = &f;
        let threads: Vec<_> = parts.iter().enumerate().map(|(r, p)| s.spawn(move || f(r, p))).collect();
        threads.into_iter().map(|t| t.join().map_err(|_| "a thread panicked")?).collect()
    })
}

/// Writes a new file of about `bytes.len()` bytes with O_DIRECT and syncs it, for comparison with
/// saving. Writes the first block of `bytes` repeatedly. Rounds the last block down to a multiple
/// of 4096 bytes.
fn write_direct(path: &Path, bytes: &[u8]) -> Result<(), Error> {
    let _ = std::fs::remove_file(path);
    let file = OpenOptions::new().write(true).create_new(true).custom_flags(libc::O_DIRECT).open(path)?;
    let mut buffer = MmapMut::map_anon(IO_BLOCK_BYTES)?;
    // the buffer is filled with data, since file systems may store zeros without writing them
    buffer.copy_from_slice(&bytes[..IO_BLOCK_BYTES.min(bytes.len())]);
    for at in (0..bytes.len()).step_by(IO_BLOCK_BYTES) {
        let n = IO_BLOCK_BYTES.min(bytes.len() - at) / 4096 * 4096;
        file.write_all_at(&buffer[..n], at as u64)?;
    }
    file.sync_all()?;
    Ok(())
}

/// Reads `len` bytes of a file with O_DIRECT and discards them, for comparison with loading. Rounds
/// the last block down to a multiple of 4096 bytes.
fn read_direct(path: &Path, len: usize) -> Result<(), Error> {
    let file = OpenOptions::new().read(true).custom_flags(libc::O_DIRECT).open(path)?;
    let mut buffer = MmapMut::map_anon(IO_BLOCK_BYTES)?;
    for at in (0..len).step_by(IO_BLOCK_BYTES) {
        let n = IO_BLOCK_BYTES.min(len - at) / 4096 * 4096;
        file.read_exact_at(&mut buffer[..n], at as u64)?;
    }
    Ok(())
}

/// Saves a checkpoint with one weight tensor, which consists of the elements in `parts`, with one
/// thread per item of `parts`. Returns the path of the checkpoint.
fn save_checkpoint(dir: &Path, parts: &[&[f32]], step: u64) -> Result<std::path::PathBuf, Error> {
    let total: usize = parts.iter().map(|p| p.len()).sum();
    let world = parts.len() as u32;
    let staging = StagingDir::create(&dir.join("checkpoints"), step, total as u64 * 4)?;
    let starts: Vec<u64> = parts
        .iter()
        .scan(0, |at, p| {
            *at += p.len() as u64;
            Some(*at - p.len() as u64)
        })
        .collect();
    let reports = run_on_each_part(parts, |r, data| {
        let piece =
            TensorPiece { name: "w", role: TensorRole::Weight, start_element: starts[r], data: data.into() };
        Ok(write_shard(staging.path(), r as u32, world, &[piece])?)
    })?;
    let null = serde_json::Value::Null;
    let model = ModelSpec {
        family: "llama".into(),
        hf_config: serde_json::json!({}),
        weights: vec![WeightShape { name: "w".into(), shape: vec![total as u64] }],
        ties: Vec::new(),
        frozen: Vec::new(),
        buffers: Vec::new(),
        adapter: None,
    };
    let facts = RunFacts {
        step,
        world,
        stage: 3,
        run_seed: 0,
        tokens: 0,
        program: "bench".into(),
        cursor: null.clone(),
        rng: null.clone(),
        groups: null.clone(),
        model,
        tokenizer: Vec::new(),
        job: null,
    };
    Ok(commit_save(staging, facts, reports)?.path)
}

/// Fills the buffers `parts`, in their order, with the elements of the weight tensor of the
/// checkpoint at `path`, with one thread per buffer. Overwrites `parts` with consecutive elements
/// of the weight, as many as each part has.
fn load_checkpoint(path: &Path, parts: &mut [Vec<f32>]) -> Result<(), Error> {
    std::thread::scope(|s| {
        let mut at = 0;
        let mut threads = Vec::new();
        for part in parts {
            let start_element = at;
            at += part.len() as u64;
            threads.push(s.spawn(move || {
                let checkpoint = Checkpoint::open(path)?;
                checkpoint.read_verified(&mut [F32ReadRequest {
                    name: "w",
                    role: TensorRole::Weight,
                    start_element,
                    out: part,
                }])?;
                Ok::<(), Error>(())
            }));
        }
        threads.into_iter().try_for_each(|t| t.join().map_err(|_| "a thread panicked")?)
    })
}
