//! Builds the emulated NCCL, a shared library that is compiled from libnccl.cpp. Tests open it in
//! the same way as NVIDIA's library.
use std::{
    fs,
    hash::{DefaultHasher, Hash, Hasher},
    path::{Path, PathBuf},
    process::Command,
    sync::OnceLock,
};

/// Returns the directory of the emulated NCCL. The first call compiles the library.
pub(crate) fn build_library() -> &'static Path {
    static DIRECTORY: OnceLock<PathBuf> = OnceLock::new();
    DIRECTORY.get_or_init(|| {
        let candidates =
            ["tests/emulated_nccl", "comm/tests/emulated_nccl", "worker/comm/tests/emulated_nccl"];
        let sources = candidates
            .map(|directory| Path::new(env!("CARGO_MANIFEST_DIR")).join(directory).join("libnccl.cpp"));
        let source = sources.into_iter().find(|source| source.exists()).expect("the source file exists");
        let emulated_gpu = source.with_file_name("../../../device/tests/emulated_gpu");
        let mut hasher = DefaultHasher::new();
        for file in [&source, &emulated_gpu.join("streams.hpp"), &emulated_gpu.join("costs.hpp")] {
            fs::read(file).expect("the source file is readable").hash(&mut hasher);
        }
        let directory = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("nccl-{:016x}", hasher.finish()));
        if directory.exists() {
            return directory;
        }
        let temporary = directory.with_extension(std::process::id().to_string());
        fs::create_dir_all(&temporary).expect("the directory can be created");
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
            .arg(temporary.join("libnccl.so.2"))
            .arg(source)
            .output()
            .expect("a C++ compiler is installed (scripts/setup-tests installs one)");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        if fs::rename(&temporary, &directory).is_err() {
            // another process has compiled the library
            assert!(directory.exists(), "cannot create {}", directory.display());
            fs::remove_dir_all(&temporary).expect("the temporary directory can be removed");
        }
        directory
    })
}
