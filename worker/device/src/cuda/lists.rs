//! Lists of the host that kernels read: tokens, labels, where documents begin.
//!
//! Each has a name and keeps its place on the card from one micro-batch to the next, whatever it holds: what reads it is the same work
//! each time. A list that lies there already isn't sent again; every layer asks for the same few.
use super::binding::Address;
use super::card::Card;
use super::error::Result;
use super::memory::Memory;
use std::{
    collections::{HashMap, VecDeque},
    sync::Arc,
};

/// Lists of one name and size that lie on the card side by side, where layers ask for different ones in turn.
const MOST: usize = 4;
/// They take turns when so many in a row are what had just gone.
const TURNS: u32 = 2;
/// Lists that were sent last and lie nowhere any more: a driver that reads the host's memory by itself may still do so.
const SENT: usize = 8;
/// Places have powers of two as sizes, bytes, from this on.
const LEAST: usize = 256;

/// The lists of one thread in one stream: what one stream was sent isn't there yet for another.
#[derive(Default)]
pub(super) struct Lists {
    /// By name and bytes.
    of: HashMap<(&'static str, usize), Places>,
    sent: VecDeque<Vec<u8>>,
}

/// Where lists of a name lie.
#[derive(Default)]
struct Places {
    all: Vec<(Memory, Vec<u8>)>,
    /// The place that the next new list gets.
    next: usize,
    /// What the last new list took the place of, and how many new lists in a row were what had just gone.
    gone: Vec<u8>,
    returned: u32,
}

impl Lists {
    /// Where the list lies, until `name` is asked for with another one.
    pub(super) fn place(&mut self, card: &Arc<Card>, name: &'static str, list: &[u8]) -> Result<Address> {
        if list.is_empty() {
            return Ok(0);
        }
        let size = list.len().next_power_of_two().max(LEAST);
        let places = self.of.entry((name, size)).or_default();
        if let Some((memory, _)) = places.all.iter().find(|(_, held)| held == list) {
            return Ok(memory.at());
        }
        // Lists that take turns want a place each.
        places.returned = if places.gone == list { places.returned + 1 } else { 0 };
        if places.all.is_empty() || places.returned >= TURNS && places.all.len() < MOST {
            places.returned = 0;
            places.next = places.all.len();
            places.all.push((card.allocate(size)?, Vec::new()));
        }
        let (at, count) = (places.next, places.all.len());
        let (memory, held) = &mut places.all[at];
        let new = list.to_vec();
        card.upload(memory.at(), &new)?;
        let old = std::mem::replace(held, new);
        places.next = (at + 1) % count;
        let place = memory.at();
        places.gone.clone_from(&old);
        self.sent.truncate(SENT - 1);
        self.sent.push_front(old);
        Ok(place)
    }
}
