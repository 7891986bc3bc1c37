//! Reads the properties of a network interface from /sys/class/net.
use protocol::{control::InterfaceAddress, network_probe::NetworkInterface};
use std::{collections::BTreeMap, fs, path::Path};

/// The file names of the kernel's counters of lost or damaged packets of a network interface.
const ERROR_COUNTERS: [&str; 5] =
    ["rx_errors", "rx_crc_errors", "rx_missed_errors", "tx_errors", "collisions"];

/// Reads the MTU, speed, driver and error counters of the network interface that `selected` names,
/// from `/sys/class/net` below the directory `root`. Properties that the kernel does not know are
/// `None`.
pub(crate) fn inspect_interface(root: &Path, selected: &InterfaceAddress) -> NetworkInterface {
    let directory = root.join("sys/class/net").join(&selected.interface);
    // The kernel answers with an error for an interface without a link, and with -1 if unknown.
    let text = |file: &str| fs::read_to_string(directory.join(file)).ok().map(|text| text.trim().to_owned());
    let number = |file: &str| text(file)?.parse::<u32>().ok().filter(|number| *number > 0);
    let counter = |name: &&str| {
        let count = text(&format!("statistics/{name}"))?.parse::<u64>().ok().filter(|count| *count > 0)?;
        Some(((*name).to_owned(), count))
    };
    NetworkInterface {
        name: selected.interface.clone(),
        address: selected.address,
        mtu: number("mtu"),
        speed_mbps: number("speed"),
        duplex: text("duplex").filter(|duplex| duplex == "full" || duplex == "half"),
        driver: read_driver_name(&directory),
        error_counters: ERROR_COUNTERS.iter().filter_map(counter).collect::<BTreeMap<_, _>>(),
    }
}

/// Returns the name of the driver of a device from a link in the device's directory in /sys/class.
/// Returns `None` for virtual devices.
pub(super) fn read_driver_name(directory: &Path) -> Option<String> {
    let driver = fs::read_link(directory.join("device/driver")).ok()?;
    Some(driver.file_name()?.to_str()?.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    #[test]
    fn properties_of_interfaces_are_read() {
        let root = tempfile::tempdir().expect("a directory");
        let net = root.path().join("sys/class/net");
        let write = |path: &str, text: &str| {
            let path = net.join(path);
            fs::create_dir_all(path.parent().expect("a parent")).expect("a directory");
            fs::write(path, text).expect("a file");
        };
        for (file, text) in [
            ("eth0/mtu", "9000\n"),
            ("eth0/speed", "100000\n"),
            ("eth0/duplex", "full\n"),
            ("eth0/statistics/rx_errors", "7\n"),
            ("eth0/statistics/tx_errors", "0\n"),
            ("veth0/mtu", "1500\n"),
            ("veth0/speed", "-1\n"),
            ("veth0/duplex", "unknown\n"),
        ] {
            write(file, text);
        }
        fs::create_dir_all(net.join("eth0/device")).expect("a directory");
        symlink("../../../bus/pci/drivers/mlx5_core", net.join("eth0/device/driver")).expect("a link");
        let inspect = |name: &str| {
            let address = InterfaceAddress { interface: name.to_owned(), address: [10, 0, 0, 1].into() };
            inspect_interface(root.path(), &address)
        };
        let found = inspect("eth0");
        assert_eq!(
            (found.mtu, found.speed_mbps, found.duplex.as_deref()),
            (Some(9000), Some(100_000), Some("full"))
        );
        assert_eq!(found.driver.as_deref(), Some("mlx5_core"));
        assert_eq!(found.error_counters, [("rx_errors".to_owned(), 7)].into());
        let found = inspect("veth0");
        assert_eq!((found.mtu, found.speed_mbps, found.duplex, found.driver), (Some(1500), None, None, None));
        assert_eq!(inspect("absent").mtu, None);
    }
}
