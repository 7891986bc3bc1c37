//! Fetching blocks from the hosts that have them, over the collectives: bounded rounds, every block verified on arrival.
use super::{
    Scattered,
    rounds::{Rounds, Transfer},
};
use crate::{
    agree::agree,
    error::{Error, Result},
};
use ckpt::{CkptError, Dtype, Run, Sink, Source, TensorInfo, TextFile, TrainingState};
use device::Buf;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::{path::Path, sync::PoisonError};

/// Elements of a block: 1 MiB as f32, which carries any bytes.
const BLOCK_ELEMENTS: usize = (1 << 20) / 4;

/// What a rank says at the beginning of each fetch.
#[derive(Default, Serialize, Deserialize)]
struct Ask {
    /// Rank 0 alone: nothing more will be read.
    end: bool,
    lacking: Vec<Run>,
}

impl Scattered {
    /// Hands others what they lack until rank 0 says [`Scattered::end`].
    pub(crate) fn serve(&self) -> Result<()> {
        while !self.fetch(Ask::default(), &mut |_, _, _| Ok(()))? {}
        self.unbroken()
    }

    /// Rank 0 has read all; ends [`Scattered::serve`] on the others.
    pub(crate) fn end(&self) -> Result<()> {
        self.unbroken()?;
        self.fetch(Ask { end: true, lacking: Vec::new() }, &mut |_, _, _| Ok(())).map(drop)
    }

    fn unbroken(&self) -> Result<()> {
        let broken = self.broken.lock().unwrap_or_else(PoisonError::into_inner);
        broken.clone().map_or(Ok(()), Err)
    }

    /// One fetch of all ranks; true when it was the last. A block that a sender can't read, or that is not what it should
    /// be, ends the fetch of nobody: the error is given when all have what they can have.
    fn fetch(&self, ask: Ask, sink: &mut Sink<'_>) -> Result<bool> {
        let rank = self.queue.comm().rank();
        let asks = agree(&self.queue, Ok(ask))?;
        if asks.first().is_some_and(|a| a.end) {
            return Ok(true);
        }
        let lacking: Vec<Vec<Run>> = asks.into_iter().map(|a| a.lacking).collect();
        let anything = lacking.iter().any(|l| !l.is_empty());
        let blocks = self.checkpoint.blocks();
        let mut rounds = Rounds::new(lacking, &self.holders, &blocks).map_err(Error::failed)?;
        let (mut unread, mut refused) = (None, None);
        loop {
            let round = rounds.next();
            if round.is_empty() {
                break;
            }
            let (send, send_counts) = self.outgoing(rank, &round, &mut unread);
            let received = self.swap(rank, &round, send, send_counts)?;
            let taken = self.take(rank, &round, &received, &mut |file, block, bytes| match refused {
                None => sink(file, block, bytes),
                Some(_) => Ok(()),
            });
            refused = refused.or(taken.err());
        }
        if anything {
            // the sender knows why; without its word a receiver knows only that bytes are wrong
            let said = agree(&self.queue, Ok(unread))?;
            if let Some(why) = said.into_iter().flatten().next() {
                return Err(Error::checkpoint(why));
            }
        }
        refused.map_or(Ok(false), |e: CkptError| Err(Error::checkpoint(e.to_string())))
    }

    /// What this rank sends in a round, in the order of receivers. What can't be read is sent as zeros.
    fn outgoing(&self, rank: usize, round: &[Transfer], unread: &mut Option<String>) -> (Buf, Vec<usize>) {
        let mine: Vec<&Transfer> = round.iter().filter(|t| t.from == rank).collect();
        let mut counts = vec![0; self.queue.comm().world()];
        for t in &mine {
            counts[t.to] += elements(&t.run);
        }
        let mut send = Buf::zeroed(counts.iter().sum());
        let mut at = 0;
        for t in mine {
            let out = bytemuck::cast_slice_mut::<f32, u8>(&mut send.host_mut()[at..at + elements(&t.run)]);
            let first = t.run.blocks.start;
            let read = self.checkpoint.read_blocks(&t.run, &mut |_, block, bytes| {
                let start = (block - first) as usize * BLOCK_ELEMENTS * 4;
                out[start..start + bytes.len()].copy_from_slice(bytes);
                Ok(())
            });
            if let Err(e) = read {
                unread.get_or_insert_with(|| format!("rank {rank}: {e}"));
            }
            at += elements(&t.run);
        }
        (send, counts)
    }

    fn swap(&self, rank: usize, round: &[Transfer], send: Buf, send_counts: Vec<usize>) -> Result<Received> {
        let mut counts = vec![0; self.queue.comm().world()];
        for t in round.iter().filter(|t| t.to == rank) {
            counts[t.from] += elements(&t.run);
        }
        let mut buf = Buf::zeroed(counts.iter().sum());
        Ok(self.queue.run(move |c| {
            c.all_to_all(buf.view_mut(), &counts, send.view(), &send_counts)?;
            Ok(Received { buf, counts })
        })?)
    }

    /// Gives what has arrived to `sink`, in the order in which it was asked for.
    fn take(
        &self,
        rank: usize,
        round: &[Transfer],
        received: &Received,
        sink: &mut Sink<'_>,
    ) -> ckpt::Result<()> {
        let sizes: Vec<u64> = self.checkpoint.files().map(|(_, bytes)| bytes).collect();
        let mut next: Vec<usize> =
            received.counts.iter().scan(0, |at, n| Some(std::mem::replace(at, *at + n))).collect();
        for t in round.iter().filter(|t| t.to == rank) {
            let at = &mut next[t.from];
            for block in t.run.blocks.clone() {
                let bytes: &[u8] = bytemuck::cast_slice(&received.buf.host()[*at..*at + BLOCK_ELEMENTS]);
                *at += BLOCK_ELEMENTS;
                let left = sizes[t.run.file].saturating_sub(block * bytes.len() as u64);
                sink(t.run.file, block, &bytes[..(bytes.len() as u64).min(left) as usize])?;
            }
        }
        Ok(())
    }
}

/// Of one round, by sender.
struct Received {
    buf: Buf,
    counts: Vec<usize>,
}

/// Elements that carry these blocks; the last block of a file is sent whole, too.
fn elements(run: &Run) -> usize {
    (run.blocks.end - run.blocks.start) as usize * BLOCK_ELEMENTS
}

impl Source for Scattered {
    fn path(&self) -> &Path {
        self.checkpoint.path()
    }

    fn tensors(&self) -> Vec<TensorInfo> {
        self.checkpoint.tensors().collect()
    }

    /// Collective: every rank calls it, or [`Scattered::serve`].
    fn read_many(&self, requests: &mut [ckpt::Request<'_>]) -> ckpt::Result<()> {
        let fetch = |lacking: Vec<Run>, sink: &mut Sink<'_>| {
            self.fetch(Ask { end: false, lacking }, sink).map(drop).map_err(|e| self.explain(e))
        };
        let mut fetched = false;
        let read = self.checkpoint.read_many_with(requests, &mut |lacking, sink| {
            fetched = true;
            fetch(lacking, sink)
        });
        if !fetched {
            // the others wait for this rank, whatever it could not do
            let _ = fetch(Vec::new(), &mut |_, _, _| Ok(()));
        }
        read
    }

    fn step(&self) -> Option<u64> {
        Source::step(&self.checkpoint)
    }

    fn weights_dtype(&self) -> Dtype {
        self.checkpoint.weights_dtype()
    }

    fn state(&self) -> TrainingState {
        self.checkpoint.state()
    }

    fn tokens(&self) -> Option<u64> {
        Source::tokens(&self.checkpoint)
    }

    fn hf_config(&self) -> Option<&Map<String, Value>> {
        self.checkpoint.hf_config()
    }

    fn adapter(&self) -> Option<&Value> {
        self.checkpoint.adapter()
    }

    fn texts(&self) -> &[TextFile] {
        self.checkpoint.texts()
    }
}

impl Scattered {
    /// An error of a fetch as one of reading; one of the collectives is kept, since no later one can be had.
    fn explain(&self, e: Error) -> CkptError {
        let message = e.message.clone();
        if e.exit != contract::exit::WorkerExit::Checkpoint {
            *self.broken.lock().unwrap_or_else(PoisonError::into_inner) = Some(e);
        }
        CkptError::Fetch { path: self.checkpoint.path().to_owned(), why: message }
    }
}
