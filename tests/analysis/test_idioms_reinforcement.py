"""State of reinforcement learning: environments, observations, buffers and exploration."""

from __future__ import annotations

from collections.abc import Callable

import pytest

CARRIED = {
    "noise that a method adds to the action": (
        """
        import gym
        from noise import OUNoise
        env, noise = gym.make("x"), OUNoise(2)
        for episode in range(10):
            state = env.reset()
            noise.reset()
            for step in range(100):  # LOOP
                action = noise.get_action(model(state), step)
                state, reward, done, _ = env.step(action)
                update(model(state).sum() * reward)
        """,
        {"env", "noise", "state"},
    ),
    "a memory that methods of a base elsewhere fill": (
        """
        from base import BaseAgent
        from data import ReplayBuffer
        class Agent(BaseAgent):
            def __init__(self, config):
                BaseAgent.__init__(self, config)
                self.memory = ReplayBuffer(config.size)
                self.net = nn.Linear(3, 2)
                self.steps = 0
            def step(self):
                while not self.done:  # LOOP
                    self.conduct_action(self.pick_action())
                    self.save_experience()
                    self.steps += 1
                    if self.steps % 4 == 0:
                        self.learn()
            def learn(self):
                loss = self.net(self.memory.sample()).sum()
                loss.backward()
                optimizer.step()
        """,
        {"self.memory", "self.steps"},
    ),
    "an inner loop of updates under a condition on what is carried": (
        """
        import gym
        from buffers import ReplayBuffer
        env, buffer, total = gym.make("x"), ReplayBuffer(100), 0
        state = env.reset()
        while total < 1000:
            action = model(state).argmax()
            state, reward, done, _ = env.step(action)
            buffer.push(state, reward)
            total += 1
            if len(buffer) > 32 and total % 4 == 0:
                for _ in range(2):  # LOOP
                    update(model(buffer.sample(8)).sum())
        """,
        {"buffer", "env", "state", "total"},
    ),
    "an agent of the file with a buffer and an exploration rate": (
        """
        import gym
        from collections import deque
        class Agent:
            def __init__(self):
                self.net = nn.Linear(3, 2)
                self.opt = torch.optim.Adam(self.net.parameters())
                self.memory = deque(maxlen=100)
                self.epsilon = 1.0
            def act(self, state):
                if random.random() < self.epsilon:
                    return random.randrange(2)
                return self.net(state).argmax().item()
            def remember(self, *transition):
                self.memory.append(transition)
            def replay(self):
                batch = random.sample(self.memory, 32)
                loss = self.net(batch).sum()
                self.opt.zero_grad()
                loss.backward()
                self.opt.step()
                if self.epsilon > 0.01:
                    self.epsilon *= 0.99
        env = gym.make("x")
        agent = Agent()
        for episode in range(10):
            state = env.reset()
            for t in range(100):  # LOOP
                action = agent.act(state)
                next_state, reward, done, _ = env.step(action)
                agent.remember(state, action, reward, next_state, done)
                state = next_state
                if done:
                    break
                if len(agent.memory) > 32:
                    agent.replay()
        """,
        {"agent", "env", "state"},
    ),
    "a moving baseline": (
        """
        baseline = 0.0
        for batch in loader:  # LOOP
            logp, reward = model(batch), batch.sum()
            advantage = reward - baseline
            baseline = 0.9 * baseline + 0.1 * reward.item()
            update(-(logp * advantage).mean())
        """,
        {"baseline"},
    ),
    "the state of a filter that is called": (
        """
        import gym
        from utils import ZFilter
        env = gym.make("x")
        normalize = ZFilter((3,), clip=5)
        obs = normalize(env.reset())
        for step in range(100):  # LOOP
            action = model(obs)
            obs, reward, done, _ = env.step(action)
            obs = normalize(obs)
            update(action.sum() * reward)
        """,
        {"env", "normalize", "obs"},
    ),
    "correlated noise": (
        """
        import gym
        from noise import OUNoise
        env, noise = gym.make("x"), OUNoise(2)
        obs = env.reset()
        for step in range(100):  # LOOP
            action = model(obs) + noise.noise()
            obs, reward, done, _ = env.step(action)
            update(action.sum() * reward)
        """,
        {"env", "noise", "obs"},
    ),
    "a tensor that an optimizer trains by itself": (
        """
        log_alpha = torch.zeros(1, requires_grad=True)
        alpha_optimizer = torch.optim.Adam([log_alpha], lr=1e-3)
        for batch in loader:  # LOOP
            logp = model(batch)
            update((log_alpha.exp().detach() * logp).mean())
            alpha_loss = -(log_alpha * logp.detach()).mean()
            alpha_optimizer.zero_grad()
            alpha_loss.backward()
            alpha_optimizer.step()
        """,
        {"log_alpha"},
    ),
    "trajectories that are trained on at the end of an episode": (
        """
        import gym
        env = gym.make("x")
        rewards, logps = [], []
        state = env.reset()
        for step in range(1000):  # LOOP
            logp = model(state)
            state, reward, done, _ = env.step(logp.argmax())
            rewards.append(reward)
            logps.append(logp)
            if done:
                returns = torch.tensor(rewards)
                update(-(torch.stack(logps) * returns).sum())
                rewards, logps = [], []
                state = env.reset()
        """,
        {"env", "logps", "rewards", "state"},
    ),
    "solved when the mean of the last scores is high": (
        """
        import gym
        from collections import deque
        import numpy as np
        env = gym.make("x")
        scores = deque(maxlen=100)
        for episode in range(1000):  # LOOP
            state, score, done = env.reset(), 0, False
            while not done:
                action = model(state)
                state, reward, done, _ = env.step(action)
                score += reward
                update(action.sum() * reward)
            scores.append(score)
            if np.mean(scores) > 195:
                break
        """,
        {"env", "scores"},
    ),
    "self-play examples": (
        """
        import gym
        examples = []
        for iteration in range(10):  # LOOP
            fresh = []
            for _ in range(5):
                fresh.append(model(torch.zeros(3)))
            examples.append(fresh)
            if len(examples) > 20:
                examples.pop(0)
            flat = [each for group in examples for each in group]
            update(torch.stack(flat).sum())
        """,
        {"examples"},
    ),
    "a running normalisation of rewards by hand": (
        """
        count, mean = 0, 0.0
        for x, reward in loader:  # LOOP
            count += 1
            mean += (reward.mean().item() - mean) / count
            update((model(x) * (reward - mean)).sum())
        """,
        {"count", "mean"},
    ),
    "two objects in a dict": (
        """
        from buffers import ReplayBuffer
        import gym
        env = gym.make("x")
        buffers = {"near": ReplayBuffer(10), "far": ReplayBuffer(10)}
        obs = env.reset()
        for step in range(100):  # LOOP
            action = model(obs).argmax()
            obs, reward, done, _ = env.step(action)
            buffers["near" if reward > 0 else "far"].add(obs)
            update(model(buffers["near"].sample(4)).sum())
        """,
        {"buffers", "env", "obs"},
    ),
    "a vectorised environment with a helper of the file": (
        """
        import gym
        def rollout(envs, obs, n):
            batch = []
            for _ in range(n):
                action = model(obs)
                obs, reward, done, info = envs.step(action)
                batch.append((obs, reward))
            return batch, obs
        envs = gym.vector.make("x", 4)
        obs = envs.reset()
        for iteration in range(100):  # LOOP
            batch, obs = rollout(envs, obs, 8)
            update(model(batch).sum())
        """,
        {"envs", "obs"},
    ),
    "a while loop over frames with its own episode": (
        """
        import gym
        env = gym.make("x")
        frames, episode, episode_reward = 0, 0, 0.0
        state = env.reset()
        while frames < 1000:  # LOOP
            eps = max(0.1, 1 - frames / 500)
            action = env.action_space.sample() if random.random() < eps else model(state).argmax()
            state, reward, done, _ = env.step(action)
            episode_reward += reward
            frames += 1
            update(model(state).sum())
            if done:
                print(episode, episode_reward)
                state, episode_reward = env.reset(), 0.0
                episode += 1
        """,
        {"env", "frames", "state"},
    ),
    "learned steps of an agent whose networks are elsewhere": (
        """
        from nets import build
        class DQN:
            def __init__(self):
                self.eval_net, self.target_net = build(), build()
                self.learn_step, self.memory_counter = 0, 0
                self.memory = torch.zeros(100, 4)
            def store(self, transition):
                index = self.memory_counter % 100
                self.memory[index, :] = transition
                self.memory_counter += 1
            def learn(self):
                if self.learn_step % 100 == 0:
                    self.target_net.load_state_dict(self.eval_net.state_dict())
                self.learn_step += 1
                batch = self.memory[torch.randint(0, 100, (8,))]
                loss = self.eval_net(batch).sum()
                loss.backward()
                optimizer.step()
        dqn = DQN()
        for transition in loader:  # LOOP
            dqn.store(transition)
            if dqn.memory_counter > 100:
                dqn.learn()
        """,
        {"dqn"},
    ),
}


@pytest.mark.parametrize("case", CARRIED)
def test_state_in_reinforcement_is_found(case: str, names: Callable[[str], set[str]]) -> None:
    body, expected = CARRIED[case]
    assert names(body) == expected
