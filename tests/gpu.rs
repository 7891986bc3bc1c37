//! GPUs from outside: what a machine without one says, and `scripts/gpu-check`.
#[path = "../worker/device/tests/card/mod.rs"]
mod card;

use std::{path::Path, process::Command};

/// `scripts/gpu-check` with the executable under test, where only the named folder holds CUDA's libraries.
fn gpu_check(folder: &Path, arguments: &[&str]) -> (Option<i32>, String) {
    with(folder, arguments, ("CARD_COUNT", "1"))
}

/// As [`gpu_check`], and the emulated card is told something.
fn with(folder: &Path, arguments: &[&str], (name, value): (&str, &str)) -> (Option<i32>, String) {
    let cache = tempfile::tempdir().expect("a folder");
    let output = Command::new(Path::new(env!("CARGO_MANIFEST_DIR")).join("scripts/gpu-check"))
        .args(["--launch", env!("CARGO_BIN_EXE_launch")])
        .args(arguments)
        .env("LD_LIBRARY_PATH", folder)
        .env("XDG_CACHE_HOME", cache.path())
        .env(name, value)
        .env_remove("VIRTUAL_ENV")
        .env_remove("CONDA_PREFIX")
        .output()
        .expect("the script runs");
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (output.status.code(), text(&output.stdout) + &text(&output.stderr))
}

#[test]
fn without_a_gpu_it_is_said_what_was_looked_for_and_where() {
    let folder = tempfile::tempdir().expect("a folder");
    let (code, said) = gpu_check(folder.path(), &["--quick"]);
    if code == Some(0) {
        return eprintln!("this machine has a GPU:\n{said}");
    }
    assert_eq!(code, Some(3), "{said}");
    let place = folder.path().display().to_string();
    for part in
        ["no GPU can be used here", "the NVIDIA driver (libcuda.so.1)", &place, "/usr/local/nvidia/lib64"]
    {
        assert!(said.contains(part), "{part} is missing in: {said}");
    }
}

#[test]
fn what_isnt_known_is_refused() {
    let folder = tempfile::tempdir().expect("a folder");
    for arguments in [&["--nonsense"][..], &["--device", "x"], &["--launch", "/no/such/file"]] {
        let (code, said) = gpu_check(folder.path(), arguments);
        assert_eq!(code, Some(2), "{arguments:?}: {said}");
    }
}

/// The whole way, from the libraries to the table: on the emulated card.
#[test]
fn an_emulated_card_passes() {
    let (code, said) = gpu_check(card::folder(), &["--quick"]);
    assert_eq!(code, Some(0), "{said}");
    for part in [
        "GPU 0: Emulated card, sm_90",
        "driver: CUDA 13.0 (",
        "NVRTC 13.0 (",
        "cuBLASLt 130100 (",
        "kernels are loaded",
    ] {
        assert!(said.contains(part), "{part} is missing in: {said}");
    }
    assert_eq!(said.matches("| ok |").count(), 10, "{said}");
}

/// The threads of a block in the other order: a kernel that lacks a barrier finds other numbers.
#[test]
fn the_order_of_threads_changes_nothing() {
    let (code, said) = with(card::folder(), &["--quick"], ("CARD_ORDER", "1"));
    assert_eq!(code, Some(0), "{said}");
}

/// Each thing that can be wrong with a machine has its name.
#[test]
fn what_is_wrong_with_a_card_is_said() {
    for (told, code, part) in [
        (("CARD_COUNT", "0"), 3, "cuInit failed: CUDA_ERROR_NO_DEVICE"),
        (("CARD_VERSION", "11080"), 3, "implements CUDA 11.8; needed: CUDA 12.0 or newer"),
        (("NVRTC_FAILS", "1"), 1, "the kernels of flat.cu don't compile"),
        (
            ("CARD_FAILS", "cuModuleLoadData:2"),
            1,
            "cuModuleLoadData of norm.cu failed: CUDA_ERROR_LAUNCH_FAILED",
        ),
        (("CARD_FAILS", "cuLaunchKernel:40"), 1, "cuLaunchKernel of"),
    ] {
        let (got, said) = with(card::folder(), &["--quick"], told);
        assert_eq!(got, Some(code), "{told:?}: {said}");
        assert!(said.contains(part), "{told:?}: {part} is missing in: {said}");
    }
}
