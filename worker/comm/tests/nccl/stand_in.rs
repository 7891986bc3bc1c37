//! A stand-in for NCCL as a shared library, built from the file beside this one. The product opens it as it opens NVIDIA's.
use std::{
    fs,
    hash::{DefaultHasher, Hash, Hasher},
    path::{Path, PathBuf},
    process::Command,
    sync::OnceLock,
};

/// Where it lies; built by the first test that asks.
pub(crate) fn folder() -> &'static Path {
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    FOLDER.get_or_init(|| {
        let places = ["tests/nccl", "comm/tests/nccl", "worker/comm/tests/nccl"];
        let sources =
            places.map(|place| Path::new(env!("CARGO_MANIFEST_DIR")).join(place).join("libnccl.cpp"));
        let source = sources.into_iter().find(|source| source.exists()).expect("the source");
        let emulated_gpu = source.with_file_name("../../../device/tests/emulated_gpu");
        let mut hasher = DefaultHasher::new();
        for file in [&source, &emulated_gpu.join("streams.hpp")] {
            fs::read(file).expect("a source").hash(&mut hasher);
        }
        let made = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("nccl-{:016x}", hasher.finish()));
        if made.exists() {
            return made;
        }
        let new = made.with_extension(std::process::id().to_string());
        fs::create_dir_all(&new).expect("a folder");
        let output = Command::new("c++")
            .args([
                "-std=c++17",
                "-O1",
                "-fPIC",
                "-shared",
                "-fvisibility=hidden",
                "-Wall",
                "-Werror",
                "-pthread",
            ])
            .arg("-I")
            .arg(emulated_gpu)
            .arg("-Wl,-soname,libnccl.so.2")
            .arg("-o")
            .arg(new.join("libnccl.so.2"))
            .arg(source)
            .output()
            .expect("a C++ compiler (scripts/setup-tests installs one)");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        if fs::rename(&new, &made).is_err() {
            assert!(made.exists(), "{} can't be made", made.display());
            fs::remove_dir_all(&new).expect("removed");
        }
        made
    })
}
