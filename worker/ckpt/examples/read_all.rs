//! Benchmark that reads and verifies every floating-point tensor of a checkpoint, and prints
//! seconds, bytes and GB/s, for comparison with `torch.load`.
//!
//! `cargo run -p ckpt --release --example read_all -- DIR [ROUNDS]`
use ckpt::{F32ReadRequest, OpenedCheckpoint, TensorInfo, TensorSource};
use memmap2::MmapMut;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

type Error = Box<dyn std::error::Error + Send + Sync>;
/// The largest number of consecutive tensor elements that the benchmark reads from the checkpoint
/// at a time.
const REQUEST_ELEMENTS: usize = 4 << 20;

fn main() -> Result<(), Error> {
    let mut args = std::env::args().skip(1);
    let dir = args.next().ok_or("usage: read_all DIR [ROUNDS]")?;
    let rounds: usize = args.next().map_or(Ok(1), |a| a.parse())?;
    for _ in 0..rounds {
        let began = Instant::now();
        let found = ckpt::open_checkpoint(Path::new(&dir))?;
        let tensors = read_tensors(found.tensor_source())?;
        let seconds = began.elapsed().as_secs_f64();
        let bytes: usize = tensors.iter().map(|t| t.len()).sum();
        println!(
            "{seconds:.3} s, {bytes} bytes of {} tensors, {:.2} GB/s",
            tensors.len(),
            bytes as f64 / seconds / 1e9
        );
        if matches!(found, OpenedCheckpoint::Native(_)) {
            println!("(native checkpoint)");
        }
    }
    Ok(())
}

/// Reads all F32, BF16 and F16 tensors of a checkpoint as F32 and verifies them, with one thread
/// per core. Returns one memory map per tensor.
fn read_tensors(source: &dyn TensorSource) -> Result<Vec<MmapMut>, Error> {
    let float = |t: &TensorInfo| matches!(t.dtype, ckpt::Dtype::F32 | ckpt::Dtype::BF16 | ckpt::Dtype::F16);
    let infos: Vec<TensorInfo> = source.tensors().into_iter().filter(float).collect();
    let mut memory = Vec::with_capacity(infos.len());
    for info in &infos {
        memory.push(MmapMut::map_anon((4 * info.element_count() as usize).max(1))?);
    }
    let mut parts: Vec<Option<F32ReadRequest<'_>>> = Vec::new();
    for (info, map) in infos.iter().zip(&mut memory) {
        let elements: &mut [f32] = bytemuck::cast_slice_mut(&mut map[..4 * info.element_count() as usize]);
        let request = |(i, out)| {
            Some(F32ReadRequest {
                name: &info.name,
                role: info.role,
                start_element: (i * REQUEST_ELEMENTS) as u64,
                out,
            })
        };
        parts.extend(elements.chunks_mut(REQUEST_ELEMENTS).enumerate().map(request));
    }
    let parts: Vec<_> = parts.into_iter().map(std::sync::Mutex::new).collect();
    let next = AtomicUsize::new(0);
    let work = || -> ckpt::Result<()> {
        while let Some(part) = parts.get(next.fetch_add(1, Ordering::Relaxed)) {
            if let Ok(mut part) = part.lock()
                && let Some(request) = part.take()
            {
                source.read_unverified(&mut [request])?;
            }
        }
        Ok(())
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> = (1..std::thread::available_parallelism().map_or(1, |n| n.get()))
            .map(|_| scope.spawn(work))
            .collect();
        work()?;
        threads.into_iter().try_for_each(|t| t.join().map_err(|_| "a thread panicked")?.map_err(Error::from))
    })?;
    source.verify_reads(false)?;
    drop(parts);
    Ok(memory)
}
