//! One piece of work in one scenario: struck at every point, and what becomes
//! of the node.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};

use kerf_kubelet_plugin::testing::{Fuse, Strike};

use crate::Selection;
use crate::disk::Left;
use crate::invariant::{ensure, published_is_on_disk};
use crate::scenario::{BYSTANDER, Scenario, pci};
use crate::scheduler::offer;
use crate::table::{Column, Row};
use crate::work::{CLAIM, Prelude, Work};
use crate::world::{Process, Sabotage, World};

/// What becomes of the claim's pod afterwards.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum After {
    /// It stays, or the kubelet goes on to give its claim back.
    Stays,
    /// It is gone with its claim, and the kubelet remembers it.
    Gone,
    /// It is gone with its claim, and the kubelet has forgotten it.
    Forgotten,
}

/// What somebody else makes right after a reboot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Rival {
    Nothing,
    /// Instances with the ids that ours had.
    Beside,
    /// Instances in all places.
    InTheWay,
}

/// The machines that a power cut is tried on, one after the other: whether
/// their GPUs keep their MIG modes, as Ampere's do. Without MIG mode nobody
/// makes instances.
const MACHINES: [(bool, Rival); 4] =
    [(true, Rival::Nothing), (true, Rival::Beside), (true, Rival::InTheWay), (false, Rival::Nothing)];

/// What a power cut left of a node.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Wreck {
    left: Left,
    modes: Vec<bool>,
    answered: bool,
    after: After,
}

/// What the kubelet is told.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Answer {
    /// The claim is prepared.
    Ready,
    /// It is not, as long as another claim's entry cannot be read.
    Waits,
    /// There is no such claim any more.
    Deleted,
}

/// A node after its work, struck or not.
struct Done {
    world: World,
    process: Option<Process>,
    result: Result<(), String>,
}

/// Some work in a scenario.
#[derive(Debug)]
pub(crate) struct Job<'a> {
    pub(crate) scenario: &'a Scenario,
    pub(crate) work: Work,
    pub(crate) sabotage: Sabotage,
    /// Where what is drawn begins.
    pub(crate) seed: u64,
    /// The node as it is before, with a pod on it.
    before: &'a World,
    prelude: Prelude,
}

/// Runs a node's life to its end, alone: with one thread for what blocks, the
/// calls come in the same order every time.
pub(crate) fn life<T>(what: impl Future<Output = Result<T, String>>) -> Result<T, String> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .max_blocking_threads(1)
        .build()
        .map_err(|error| error.to_string())?;
    catch_unwind(AssertUnwindSafe(|| runtime.block_on(what))).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().cloned();
        Err(text.unwrap_or_else(|| "panicked".to_owned()))
    })
}

impl<'a> Job<'a> {
    /// The work in a scenario, where there is such.
    pub(crate) fn new(
        before: &'a World,
        scenario: &'a Scenario,
        work: Work,
        sabotage: Sabotage,
        seed: u64,
    ) -> Option<Self> {
        let mut job = Self { scenario, work, sabotage, seed, before, prelude: None };
        if let Some((before, kinds, strike)) = work.prelude() {
            let calls = Self { work: before, ..job }.points().ok()?;
            let found = calls.iter().rposition(|call| kinds.iter().any(|kind| call.starts_with(kind)));
            job.prelude = Some((found?, strike));
        }
        work.applies(scenario).then_some(job)
    }

    /// The work's calls, by name, where nothing strikes.
    pub(crate) fn points(&self) -> Result<Vec<String>, String> {
        life(async {
            let done = self.done(Vec::new()).await;
            let process = done.process.ok_or("kerf does not start")?;
            if self.work != Work::Refused && self.sabotage == Sabotage::None {
                done.result?;
            }
            Ok(process.fuse.calls())
        })
    }

    /// Does the work with these strikes.
    async fn done(&self, strikes: Vec<(usize, Strike)>) -> Done {
        let mut world = World::like(self.before, self.sabotage, self.seed);
        self.work.set_up(&mut world, self.scenario, self.prelude).await;
        // That of a refused prepare is part of the work itself.
        let refused = self.prelude.filter(|_| self.work == Work::Refused);
        let fuse = Fuse::with(strikes.into_iter().chain(refused).collect());
        let Some(process) = world.process(&fuse) else {
            return Done { world, process: None, result: Err("it did not start".to_owned()) };
        };
        let result = self.work.run(&mut world, &process).await;
        let process = Some(process).filter(|process| !process.fuse.is_dead());
        Done { world, process, result }
    }

    /// Strikes every point, in every way, and tells what survived.
    pub(crate) fn rows(&self, selection: Selection) -> Vec<Row> {
        let mut random = fastrand::Rng::with_seed(selection.seed ^ self.seed);
        let is_whole = selection.share >= 1.0;
        let mut draw = random.fork();
        let mut chosen = move || is_whole || draw.f64() < selection.share;
        let points = match self.points() {
            Ok(points) => points,
            Err(error) => {
                let mut row = Row::new(self, 0, "(nothing strikes)");
                row.count(Column::KilledBefore, Err(error));
                return vec![row];
            }
        };
        let mut afters = vec![After::Stays, After::Gone, After::Forgotten];
        // Of a claim whose entry cannot be read nobody can ask the API.
        afters.retain(|after| *after != After::Forgotten || !self.work.is_unreadable());
        let mut rows = Vec::new();
        let mut known: BTreeMap<Wreck, Result<(), String>> = BTreeMap::new();
        for (number, name) in points.iter().map(String::as_str).chain(["(it is done)"]).enumerate() {
            let mut row = Row::new(self, number, name);
            for (column, strike) in Column::STRIKES {
                let is_struck = number < points.len() && column.applies(name);
                // There are many reads: each with one end of the pod in turn.
                let is_turn = |at: usize| Column::KilledBefore.applies(name) || at == number % afters.len();
                for (_, after) in afters.iter().enumerate().filter(|(at, _)| is_struck && is_turn(*at)) {
                    if chosen() {
                        row.count(column, life(self.struck((number, name), strike, *after)));
                    }
                }
            }
            for after in afters.iter().filter(|_| Column::PowerCut.applies(name)) {
                if chosen() {
                    let sample = Some(&mut random).filter(|_| !is_whole);
                    for result in self.cut(number, number < points.len(), *after, &mut known, sample) {
                        row.count(Column::PowerCut, result);
                    }
                }
            }
            rows.push(row);
        }
        rows
    }

    /// Strikes one point in one way.
    async fn struck(
        &self,
        (number, name): (usize, &str),
        strike: Strike,
        after: After,
    ) -> Result<(), String> {
        let Done { mut world, process, result } = self.done(vec![(number, strike)]).await;
        if let Some(process) = &process {
            // How often it looks hangs on when its parts are told of a change;
            // what it could not read it cannot tell.
            if Column::KilledBefore.applies(name) {
                ensure(process.fuse.has_struck(number), || "the point was not reached".to_owned())?;
                published_is_on_disk(&world, process)?;
            }
        }
        let fails = !matches!(strike, Strike::KilledBefore | Strike::KilledAfter | Strike::Late);
        if let (Err(error), true, true) = (&result, fails, process.is_some()) {
            let causes = [
                "No space left",
                "Input/output error",
                "Read-only file system",
                "Too many open files",
                "in use",
                "unprepare",
            ];
            let told = causes.iter().any(|cause| error.contains(cause));
            ensure(told, || format!("the error does not say why: {error}"))?;
        }
        let context = format!("{after:?}, {result:?}");
        // What could not be read once is in quarantine until it is written anew.
        let misread = matches!(strike, Strike::Fails | Strike::FailsOn | Strike::NoFiles);
        let survived = self.survive(&mut world, process, result.is_ok(), after, misread).await;
        survived.map_err(|error| format!("{context}: {error}"))
    }

    /// Cuts the power after a point; each wreck that may be left, once, or one
    /// that is drawn.
    fn cut(
        &self,
        number: usize,
        strikes: bool,
        after: After,
        known: &mut BTreeMap<Wreck, Result<(), String>>,
        sample: Option<&mut fastrand::Rng>,
    ) -> Vec<Result<(), String>> {
        let strikes = if strikes { vec![(number, Strike::KilledAfter)] } else { Vec::new() };
        let wrecks = life(async {
            let done = self.done(strikes).await;
            let (modes, answered) = (done.world.modes(), done.result.is_ok());
            let wreck = |left| Wreck { left, modes: modes.clone(), answered, after };
            Ok((done.world.disk.cuts().into_iter().map(wreck).collect::<Vec<_>>(), done.world.objects))
        });
        let (mut wrecks, objects) = match wrecks {
            Ok(wrecks) => wrecks,
            Err(error) => return vec![Err(error)],
        };
        if let Some(random) = sample {
            wrecks = vec![wrecks.swap_remove(random.usize(..wrecks.len()))];
        }
        let mut results = Vec::new();
        for wreck in wrecks {
            let machine = MACHINES[(number + known.len()) % MACHINES.len()];
            let result = known.entry(wreck).or_insert_with_key(|wreck| {
                let survived = life(async {
                    let mut world = World::new(&wreck.left, self.sabotage, self.seed);
                    let modes: Vec<bool> = wreck.modes.iter().map(|on| *on && machine.0).collect();
                    world.boot("boot-3", &modes);
                    match machine.1 {
                        Rival::Nothing => {}
                        Rival::Beside => {
                            world.make_foreign(&[0, 1, 3].map(|start| (pci(1), 19, start, start == 1)));
                        }
                        Rival::InTheWay => {
                            world.make_foreign(&[1, 2, 3, 4].map(|gpu| (pci(gpu), 0, 0, false)));
                        }
                    }
                    for (name, object) in &objects {
                        world.put(name, object.clone());
                    }
                    self.survive(&mut world, None, wreck.answered, wreck.after, false).await
                });
                let names: Vec<_> = wreck.left.keys().collect();
                survived.map_err(|error| format!("{after:?}, {machine:?}, left {names:?}: {error}"))
            });
            results.push(result.clone());
        }
        results
    }

    /// The kubelet asks for the claim of a pod. A pod that cannot get it since
    /// somebody else made an instance meanwhile is deleted.
    async fn asked(
        &self,
        world: &mut World,
        process: &Process,
        name: &str,
        misread: bool,
    ) -> Result<Answer, String> {
        let Err(error) = world.prepare(process, name).await else { return Ok(Answer::Ready) };
        if misread && error.contains("in quarantine") {
            process.plugin.reconcile_now().await;
            return Box::pin(self.asked(world, process, name, false)).await;
        }
        if self.work.is_unreadable() && error.contains("in quarantine") {
            return Ok(Answer::Waits);
        }
        ensure(error.contains("GPU instance") && !world.foreign.is_empty(), || format!("{name}: {error}"))?;
        world.unprepare(process, name).await?;
        world.delete(name);
        Ok(Answer::Deleted)
    }

    /// Lives on, with the process that was there or a new one, until nothing is
    /// left.
    async fn survive(
        &self,
        world: &mut World,
        process: Option<Process>,
        answered: bool,
        after: After,
        misread: bool,
    ) -> Result<(), String> {
        let devices = &self.scenario.devices;
        let process = match process {
            Some(process) => process,
            None => started(world).await?,
        };
        process.fuse.heal();
        let mut live = vec![BYSTANDER];
        let mut bystander = Answer::Ready;
        if world.booted {
            bystander = self.asked(world, &process, BYSTANDER, false).await?;
        }
        let mut claim = Answer::Deleted;
        match after {
            After::Stays if self.work.has_pod() => {
                claim = self.asked(world, &process, CLAIM, misread).await?;
            }
            After::Stays | After::Gone => {
                if after == After::Gone {
                    world.delete(CLAIM);
                }
                // Who was answered does not ask again.
                if !answered || !self.work.is_asked_for() {
                    world.unprepare(&process, CLAIM).await?;
                }
            }
            After::Forgotten => {
                world.delete(CLAIM);
                world.reconcile_for_long(&process, &[BYSTANDER]).await;
            }
        }
        if bystander == Answer::Waits {
            bystander = self.asked(world, &process, BYSTANDER, false).await?;
            ensure(bystander != Answer::Waits, || "another claim still waits".to_owned())?;
        }
        if bystander == Answer::Deleted {
            live.clear();
        }
        if claim == Answer::Ready {
            live.push(CLAIM);
            process.plugin.reconcile_now().await;
            world.check(&process, &live)?;
            // The kubelet has restarted, or the claim's other driver was not ready.
            let first = world.answers.get(CLAIM).cloned();
            world.prepare(&process, CLAIM).await?;
            ensure(world.answers.get(CLAIM) == first.as_ref(), || "another answer".to_owned())?;
            offer(world, &process, &live, devices).await?;
            unchanged(&process).await?;
            live.pop();
            world.unprepare(&process, CLAIM).await?;
        }
        ensure(claim != Answer::Waits, || "the claim waits for its own entry".to_owned())?;
        world.delete(CLAIM);
        process.plugin.reconcile_now().await;
        world.check(&process, &live)?;
        offer(world, &process, &live, devices).await?;
        unchanged(&process).await?;
        drop(process);
        let process = started(world).await?;
        world.check(&process, &live)?;
        if live.contains(&BYSTANDER) {
            world.unprepare(&process, BYSTANDER).await?;
        }
        world.check(&process, &[])?;
        for folder in ["plugin/state/claims", "cdi"] {
            let files = world.node.files(folder);
            ensure(files.is_empty(), || format!("left in {folder}: {files:?}"))?;
        }
        Ok(())
    }
}

/// A new process, which nothing strikes.
async fn started(world: &World) -> Result<Process, String> {
    let process = world.process(&Fuse::none()).ok_or("kerf does not start again")?;
    process.plugin.start().await.map_err(|error| kerf_kubelet_plugin::chain(&error))?;
    Ok(process)
}

/// On a healthy node reconcile changes nothing.
async fn unchanged(process: &Process) -> Result<(), String> {
    let before = process.fuse.calls().len();
    process.plugin.reconcile_now().await;
    let mut calls = process.fuse.calls().split_off(before);
    calls.retain(|call| !call.starts_with("read ") && !call.starts_with("list "));
    ensure(calls.is_empty(), || format!("reconcile on a healthy node: {calls:?}"))
}
