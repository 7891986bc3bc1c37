//! [`NcclLibrary`]: opens the NCCL library at run time and looks up its functions.
use super::binding::{ID_BYTES, IN_PROGRESS, NcclFunctions, SUCCESS, Status};
use crate::nccl_error::{NcclError, Result};
use cudarc::nccl::sys::{ncclComm_t, ncclUniqueId};
use std::{
    ffi::{CStr, c_int},
    path::{Path, PathBuf},
    ptr,
    sync::Arc,
};

/// The oldest supported version of NCCL, 2.18. Older versions have no reliable non-blocking
/// communicators.
const MIN_VERSION: c_int = 21_800;
/// The first version of NCCL that lets several ranks use the same GPU, 2.30. Older versions reject
/// a duplicate GPU.
const MIN_GPU_SHARING_VERSION: c_int = 23_000;

/// A handle to the opened NCCL library, its functions and its version.
#[derive(Clone)]
pub struct NcclLibrary {
    pub(super) api: Arc<NcclFunctions>,
    path: PathBuf,
    version: c_int,
}

impl NcclLibrary {
    /// Opens the NCCL library from the first directory in `directories` that contains a loadable
    /// `libnccl.so.2`. If none does, lets the dynamic loader search for the library. Fails if the
    /// version is too old.
    pub fn open(directories: &[PathBuf]) -> Result<NcclLibrary> {
        let mut attempts = Vec::new();
        let name = PathBuf::from("libnccl.so.2");
        for path in directories.iter().map(|directory| directory.join(&name)).chain([name.clone()]) {
            // SAFETY: NCCL's initializers have no preconditions. The owner of the machine decides
            // which file this is.
            match unsafe { libloading::Library::new(&path) } {
                Ok(library) => return NcclLibrary::from_library(library, path),
                Err(e) => {
                    let reason = std::error::Error::source(&e).map(ToString::to_string);
                    attempts.push(reason.unwrap_or_else(|| format!("{}: {e}", path.display())));
                }
            }
        }
        Err(NcclError::LibraryNotFound { attempts })
    }

    /// Looks up NCCL's functions and version in a library that the dynamic loader has opened. Fails
    /// if a function is missing or the version is too old.
    fn from_library(library: libloading::Library, path: PathBuf) -> Result<NcclLibrary> {
        let api = NcclFunctions::resolve(library).map_err(|missing| NcclError::LibraryTooOld {
            path: path.clone(),
            found: format!("a version without {}", missing.0),
        })?;
        let mut nccl = NcclLibrary { api: Arc::new(api), path, version: 0 };
        let mut version = 0;
        // SAFETY: writes one number.
        let status = unsafe { (nccl.api.ncclGetVersion)(&mut version) };
        nccl.check_status("ncclGetVersion", status, ptr::null_mut())?;
        if version < MIN_VERSION {
            return Err(NcclError::LibraryTooOld { path: nccl.path, found: format_version(version) });
        }
        nccl.version = version;
        Ok(nccl)
    }

    /// Returns whether this version of NCCL lets two ranks share a GPU if
    /// `NCCL_MULTI_RANK_GPU_ENABLE=1` is set.
    pub fn supports_gpu_sharing(&self) -> bool {
        self.version >= MIN_GPU_SHARING_VERSION
    }

    /// Returns the version of the NCCL library, such as `2.27.3`.
    pub fn version(&self) -> String {
        format_version(self.version)
    }

    /// Returns the path of the library, or only its name if the dynamic loader found it.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Formats the library's version and path for logs and messages.
    pub fn describe(&self) -> String {
        format!("NCCL {} ({})", self.version(), self.path.display())
    }

    /// Creates NCCL's unique id of a new group, with which ranks join the group. One rank creates
    /// the id, and all ranks pass it to NCCL.
    pub fn create_unique_id(&self) -> Result<[u8; ID_BYTES]> {
        let mut id = ncclUniqueId { internal: [0; ID_BYTES] };
        // SAFETY: writes an id.
        let status = unsafe { (self.api.ncclGetUniqueId)(&mut id) };
        self.check_status("ncclGetUniqueId", status, ptr::null_mut())?;
        Ok(bytemuck::cast(id.internal))
    }

    /// Fails with NCCL's message if `status`, which `function` returned, is an error. `comm` is the
    /// communicator that was used, or null.
    pub(super) fn check_status(&self, function: &str, status: Status, comm: ncclComm_t) -> Result<()> {
        if status == SUCCESS || status == IN_PROGRESS {
            return Ok(());
        }
        // SAFETY: the texts are null or live as long as the library; the caller owns the
        // communicator.
        let message = unsafe {
            let texts = [(self.api.ncclGetErrorString)(status), (self.api.ncclGetLastError)(comm)];
            let texts = texts
                .into_iter()
                .filter(|text| !text.is_null())
                .map(|text| CStr::from_ptr(text).to_string_lossy().into_owned());
            texts.filter(|t| !t.trim().is_empty()).collect::<Vec<_>>().join(": ")
        };
        Err(NcclError::Call { function: function.to_owned(), status, message })
    }
}

/// Formats a version number as NCCL reports it: `21803` becomes `2.18.3`.
fn format_version(version: c_int) -> String {
    format!("{}.{}.{}", version / 10_000, version / 100 % 100, version % 100)
}
