//! The real cuDNN takes the graphs of attention, and compiles them, for cards that aren't here: it needs no more of them than their
//! properties.
mod card;

use device::cuda::{Places, Wanted, attention_bytes, attention_plans};
use device::ops::AttentionShape;
use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

/// Where cuDNN lies. None where it isn't installed, which is an error where everything is asked for.
fn cudnn() -> Option<PathBuf> {
    let nvrtc = card::nvrtc()?;
    let folder = nvrtc.ancestors().nth(4).expect("the cache").join("cudnn/nvidia/cudnn/lib");
    if folder.exists() {
        return Some(folder);
    }
    let why = "skipped: no cuDNN (scripts/setup-tests --all installs it)";
    assert!(std::env::var("LAUNCH_TEST_REQUIRE").as_deref() != Ok("all"), "{why}");
    eprintln!("{why}");
    None
}

/// Loads what cuDNN looks for by name, as a process has it in which a card was opened. Stays.
fn load_neighbours(folder: &Path) {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/card/absent.c");
    for (name, define) in [("libcuda.so.1", "-DDRIVER"), ("libcublasLt.so.13", "-DBLAS")] {
        let library = folder.join(name);
        let output = Command::new("cc")
            .args(["-shared", "-fPIC", "-O1", "-Wall", "-Werror", define])
            .arg(format!("-Wl,-soname,{name}"))
            .arg("-o")
            .arg(&library)
            .arg(&source)
            .output()
            .expect("a C compiler (scripts/setup-tests installs one)");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        // SAFETY: it does nothing when it is loaded.
        std::mem::forget(unsafe { libloading::Library::new(&library) }.expect("loaded"));
    }
    let places = Places { job: vec![card::nvrtc().expect("NVRTC")], ..Places::default() };
    std::mem::forget(places.open(Wanted::Compiler).expect("NVRTC"));
}

/// Version (900 is sm_90), multiprocessors, shared memory of a block, memory, cache.
const CARDS: [(&str, [u64; 5]); 3] = [
    ("NVIDIA A100-SXM4-80GB", [800, 108, 166_912, 80 << 30, 40 << 20]),
    ("NVIDIA H200", [900, 132, 232_448, 141 << 30, 50 << 20]),
    ("NVIDIA B200", [1000, 148, 232_448, 180 << 30, 126 << 20]),
];

/// As cuDNN writes them.
fn properties(name: &str, [version, multiprocessors, shared, memory, cache]: [u64; 5]) -> String {
    format!(
        r#"{{"deviceVer": {version}, "multiProcessorCount": {multiprocessors}, "warpSize": 32, "maxSharedMemoryPerBlock": 49152,
        "maxSharedMemoryPerBlockOptin": {shared}, "reservedSharedMemoryPerBlock": 1024, "maxRegistersPerSM": 65536,
        "maxCtasPerSM": 32, "maxThreadsPerBlock": 1024, "maxThreadsPerSM": 2048, "regsPerBlock": 65536,
        "totalGlobalMem": {memory}, "smClockRateKHz": 1980000, "l2CacheSize": {cache}, "maxBlockSize": [1024, 1024, 64],
        "memClockRateKHz": 2619000, "maxGridSize": [2147483647, 65535, 65535], "supportCoopLaunch": 1, "pciDeviceId": 0,
        "isTccDriver": 0, "cudaDeviceId": 0, "driverVer": 13000, "deviceName": "{name}"}}"#
    )
}

#[test]
fn cudnn_has_plans_for_every_models_attention() {
    let Some(cudnn) = cudnn() else { return };
    let folder = tempfile::tempdir().expect("folder");
    load_neighbours(folder.path());
    let places = Places { job: vec![cudnn], ..Places::default() };
    let plans = |card: usize, shape, window| {
        attention_plans(&places, &properties(CARDS[card].0, CARDS[card].1), shape, window)
    };
    // GPT-2 124M, Qwen2.5-0.5B and 1.5B, Llama-3.2-1B, Llama-3.1-8B; odd lengths, few heads, windows
    let models = [
        (16, 1024, 12, 12, 64),
        (8, 2048, 14, 2, 64),
        (8, 2048, 12, 2, 128),
        (8, 2048, 32, 8, 64),
        (2, 2048, 32, 8, 128),
    ];
    let odd = [(1, 1000, 4, 4, 64), (3, 37, 4, 1, 16), (1, 2, 1, 1, 8), (2, 700, 6, 2, 80)];
    for (card, (name, _)) in CARDS.iter().enumerate() {
        for (i, (b, t, heads, kv_heads, dim)) in models.into_iter().chain(odd).enumerate() {
            let is_skipped = card != 1 && i % 2 == 0; // each takes a second
            let window = (i % 3 == 2 && t > 100).then_some(t / 8);
            let what = format!("{name}, {b} × {t}, {heads}/{kv_heads} × {dim}, window {window:?}");
            if is_skipped {
                continue;
            }
            let shape = AttentionShape::new(b, t, heads, kv_heads, dim);
            let needed = plans(card, shape, window).unwrap_or_else(|e| panic!("{what}: {e}"));
            let most = needed.map(|needed| needed.unwrap_or_else(|| panic!("{what}: no plan")));
            // what a plan of memory counts
            assert!(most.iter().all(|bytes| *bytes <= attention_bytes(shape) + 4096), "{what}: {most:?}");
        }
    }
    // What it can't do it says it can't: no plan, or its reason.
    let wide = plans(1, AttentionShape::new(1, 64, 2, 2, 512), None);
    assert!(wide.as_ref().is_err() || wide.as_ref().is_ok_and(|found| found.contains(&None)), "{wide:?}");
    let error = attention_plans(&places, "{}", AttentionShape::new(1, 64, 2, 2, 64), None)
        .expect_err("no properties");
    assert!(error.to_string().contains("maxGridSize"), "{error}");
}

#[test]
fn a_cudnn_that_cant_be_used_is_named() {
    let folder = tempfile::tempdir().expect("folder");
    let places = Places { job: vec![folder.path().to_owned()], ..Places::default() };
    fs::write(folder.path().join("libcudnn.so.9"), "no library").expect("a file");
    let shape = AttentionShape::new(1, 64, 2, 2, 64);
    let error = attention_plans(&places, "{}", shape, None).expect_err("nothing to open").to_string();
    assert!(error.contains("cuDNN") && error.contains("libcudnn.so.9"), "{error}");
}
